-- What replays leave in Postgres: that there was one, with what it was asked to do, and which of them a delivery has obeyed.
-- How far a replay has come is in Kafka, in the transaction of the records it stands for.

CREATE TABLE afluente.relay_replay (
    id          uuid PRIMARY KEY,
    -- Replays that make workers do things again are told apart by it, the later one by the higher.
    number      bigint NOT NULL GENERATED ALWAYS AS IDENTITY UNIQUE,
    arguments   jsonb NOT NULL,
    actor       text NOT NULL,
    reason      text NOT NULL DEFAULT '',
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- For people, and a little behind what Kafka says.
    progress    jsonb NOT NULL DEFAULT '{}',
    progress_at timestamptz,
    finished_at timestamptz
);
COMMENT ON TABLE afluente.relay_replay IS 'Each `afluente relay replay`: what it was asked to do, and how far it has come.';
GRANT SELECT, INSERT, UPDATE ON afluente.relay_replay TO afluente_worker;

-- The newest replay with --again whose record ran this delivery: a second copy of that record, or a replay resumed, finds
-- its number here and does nothing.
ALTER TABLE event_delivery ADD COLUMN replay bigint NOT NULL DEFAULT 0 CHECK (replay >= 0);

-- A month whose deliveries were dropped gets its partition back, for those that a replay with --again makes anew. The floor
-- goes on saying that of this month not all is known.
CREATE FUNCTION afluente.reopen_delivery_month(month date) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _month timestamp := date_trunc('month', reopen_delivery_month.month::timestamp);
    _floor timestamptz;
BEGIN
    -- The lock of ensure_partitions, taken before the floor is read: two at once would take the lowered one for the true one.
    PERFORM pg_advisory_xact_lock(hashtext('afluente.ensure_partitions'));
    IF to_regclass(format('public.event_delivery_y%sm%s', to_char(_month, 'YYYY'), to_char(_month, 'MM'))) IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT greatest(m.floor, (_month + interval '1 month') AT TIME ZONE 'UTC') INTO STRICT _floor
      FROM afluente.monthly_partitioned m
     WHERE m.table_name = 'public.event_delivery'::regclass;
    UPDATE afluente.monthly_partitioned m SET floor = '-infinity' WHERE m.table_name = 'public.event_delivery'::regclass;
    PERFORM afluente.ensure_partitions(_month::date, _month::date);
    UPDATE afluente.monthly_partitioned m SET floor = _floor WHERE m.table_name = 'public.event_delivery'::regclass;
END;
$$;
REVOKE ALL ON FUNCTION afluente.reopen_delivery_month(date) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.reopen_delivery_month(date) TO afluente_worker;
