-- What the relay keeps in Postgres: who owns a lane, and that the lane has published. The position itself is in Kafka,
-- where one transaction writes it together with the records it stands for.

CREATE TABLE afluente.relay_lane (
    name             text PRIMARY KEY,       -- its transactional.id
    instance         text,                   -- the owner; NULL when it gave the lane up
    liveness_key     bigint,                 -- advisory lock that the owner's session holds while it lives
    renewed_at       timestamptz,
    owned_since      timestamptz,
    takeovers        integer NOT NULL DEFAULT 0,
    -- Set with the first claim: from then on a lane without a position has lost it, and must not begin again at row one.
    kafka_cluster_id text,
    first_claimed_at timestamptz
);
COMMENT ON TABLE afluente.relay_lane IS 'The lease of each relay lane, and whether it has ever published.';
GRANT SELECT, INSERT, UPDATE ON afluente.relay_lane TO afluente_worker;

-- What a position is checked against. The sequence is read with its owner's rights; the timeline is that of the WAL being
-- written (the control file still names the old one for a while after a promotion), and NULL on a standby.
CREATE FUNCTION afluente.relay_facts(
    OUT in_recovery boolean, OUT system_identifier text, OUT timeline integer, OUT database_oid bigint,
    OUT database_name text, OUT last_seq bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_is_in_recovery(),
           (SELECT c.system_identifier::text FROM pg_control_system() c),
           CASE WHEN NOT pg_is_in_recovery()
                THEN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer END,
           d.oid::bigint,
           d.datname,
           COALESCE(pg_sequence_last_value(pg_get_serial_sequence('public.event_log', 'seq')::regclass), 0)
      FROM pg_database d
     WHERE d.datname = current_database()
$$;
REVOKE ALL ON FUNCTION afluente.relay_facts() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.relay_facts() TO afluente_worker;
