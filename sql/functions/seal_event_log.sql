-- needs: 0011
-- Called by the relay with its position (s1, t1): seals the months of event_log that are over and published, oldest first;
-- returns how many. Two steps a month. First, a minute after its end, the boundary is noted: the minute covers an emission
-- that had read the clock and not yet inserted. Then, once every transaction below the boundary has ended in s1 and no row
-- of the month is outside (s1, t1), inserts are refused from here on.
CREATE OR REPLACE FUNCTION afluente.seal_event_log(s1 pg_snapshot, t1 bigint) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    _month       record;
    _unpublished boolean;
    _last_seq    bigint;
    _sealed      integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('afluente.seal_event_log')) THEN
        RETURN 0;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot would not see what was committed while the lock below was waited for.
        RAISE EXCEPTION 'seal_event_log needs a READ COMMITTED transaction' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    INSERT INTO public.event_log_seal (month, ends_at, boundary)
    SELECT p.month, p.ends_at, pg_current_xact_id()  -- not a snapshot's xmax: the newest open transaction may have that id
      FROM afluente.event_log_partitions() p
     WHERE p.ends_at <= clock_timestamp() - interval '1 minute'
       AND NOT EXISTS (SELECT FROM public.event_log_seal s WHERE s.month = p.month)
        ON CONFLICT (month) DO NOTHING;
    FOR _month IN
        SELECT p.partition, s.month, s.ends_at, s.boundary
          FROM public.event_log_seal s
          JOIN afluente.event_log_partitions() p ON p.month = s.month
         WHERE s.sealed_at IS NULL
         ORDER BY s.month
    LOOP
        -- Not past the boundary: later months are not either, and months are sealed in order.
        EXIT WHEN pg_snapshot_xmin(seal_event_log.s1) < _month.boundary;
        BEGIN
            -- No writer is in it, and none comes in. A writer there now is a clock that stepped back: another time.
            EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', _month.partition);
        EXCEPTION
            WHEN lock_not_available THEN
                EXIT;
        END;
        EXECUTE format(
            'SELECT EXISTS (SELECT FROM %1$s WHERE tx_id >= pg_snapshot_xmax($1))
                 OR EXISTS (SELECT FROM %1$s WHERE tx_id = ANY ($3))
                 OR EXISTS (SELECT FROM %1$s WHERE seq > $2)', _month.partition)
           INTO _unpublished
          USING seal_event_log.s1, seal_event_log.t1, ARRAY(SELECT pg_snapshot_xip(seal_event_log.s1));
        EXIT WHEN _unpublished;
        EXECUTE format('CREATE TRIGGER sealed BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION afluente.refuse_sealed()',
                       _month.partition);
        -- Whoever wrote into the month has ended: its id is under the present xmax. Lanes that are behind, and those that
        -- do not exist yet, read the month until their xmin is past that, and their t1 past the month's last seq.
        EXECUTE format('SELECT COALESCE(max(seq), 0) FROM %s', _month.partition) INTO _last_seq;
        UPDATE public.event_log_seal s
           SET sealed_at = clock_timestamp(), last_seq = _last_seq,
               boundary = greatest(s.boundary, pg_snapshot_xmax(pg_current_snapshot()))
         WHERE s.month = _month.month;
        UPDATE afluente.monthly_partitioned m SET floor = _month.ends_at WHERE m.table_name = 'public.event_log'::regclass;
        _sealed := _sealed + 1;
    END LOOP;
    RETURN _sealed;
END;
$$;
REVOKE ALL ON FUNCTION afluente.seal_event_log(pg_snapshot, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.seal_event_log(pg_snapshot, bigint) TO afluente_worker;
