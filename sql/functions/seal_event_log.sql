-- needs: 0003
-- Called by the relay with its position (s1, t1): seals the months of event_log that are over and published, oldest first;
-- returns how many. Two steps a month. First, a minute after its end, the boundary is noted: the minute covers an emission
-- that had read the clock and not yet inserted. Then, once every transaction below the boundary has ended in s1 and no row
-- of the month is outside (s1, t1), inserts are refused from here on.
CREATE OR REPLACE FUNCTION afluente.seal_event_log(s1 pg_snapshot, t1 bigint) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s'
AS $$
DECLARE
    _month       record;
    _seal        public.event_log_seal;
    _unpublished boolean;
    _sealed      integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('afluente.seal_event_log')) THEN
        RETURN 0;
    END IF;
    FOR _month IN
        SELECT i.inhrelid::regclass AS partition,
               to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM') AS month
          FROM pg_inherits i
          JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'public.event_log'::regclass
         ORDER BY 2
    LOOP
        SELECT * INTO _seal FROM public.event_log_seal s WHERE s.month = _month.month;
        CONTINUE WHEN _seal.sealed_at IS NOT NULL;
        IF _seal.month IS NULL THEN
            EXIT WHEN (_month.month + interval '1 month') AT TIME ZONE 'UTC' > clock_timestamp() - interval '1 minute';
            INSERT INTO public.event_log_seal (month, ends_at, boundary)
            VALUES (_month.month, (_month.month + interval '1 month') AT TIME ZONE 'UTC', pg_snapshot_xmax(pg_current_snapshot()))
            RETURNING * INTO _seal;
        END IF;
        -- Not past the boundary: later months are not either, and months are sealed in order.
        EXIT WHEN pg_snapshot_xmin(seal_event_log.s1) < _seal.boundary;
        EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', _month.partition);  -- no writer is in it, none comes in
        EXECUTE format(
            'SELECT EXISTS (SELECT FROM %1$s WHERE tx_id >= pg_snapshot_xmax($1))
                 OR EXISTS (SELECT FROM %1$s WHERE tx_id = ANY ($3))
                 OR EXISTS (SELECT FROM %1$s WHERE seq > $2)', _month.partition)
           INTO _unpublished
          USING seal_event_log.s1, seal_event_log.t1, ARRAY(SELECT pg_snapshot_xip(seal_event_log.s1));
        EXIT WHEN _unpublished;
        EXECUTE format('CREATE TRIGGER sealed BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION afluente.refuse_sealed()',
                       _month.partition);
        UPDATE public.event_log_seal s SET sealed_at = clock_timestamp() WHERE s.month = _month.month;
        UPDATE afluente.monthly_partitioned m SET floor = _seal.ends_at WHERE m.table_name = 'public.event_log'::regclass;
        _sealed := _sealed + 1;
    END LOOP;
    RETURN _sealed;
END;
$$;
REVOKE ALL ON FUNCTION afluente.seal_event_log(pg_snapshot, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.seal_event_log(pg_snapshot, bigint) TO afluente_worker;
