-- What people tell a relay: to pause, and to publish again a row that it could not publish. `topic_prefix` names the
-- installation whose relay is meant ('': the one without a prefix). And what its status says of other sessions.

CREATE TABLE afluente.relay_pause (
    topic_prefix text PRIMARY KEY,
    paused_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_by    text NOT NULL,
    reason       text NOT NULL DEFAULT '',
    resumed_at   timestamptz,  -- NULL: paused
    resumed_by   text
);
COMMENT ON TABLE afluente.relay_pause IS 'The newest pause of each installation''s relay: who, when, why, and who ended it.';
GRANT SELECT, INSERT, UPDATE ON afluente.relay_pause TO afluente_worker;

-- What was decided about each dead letter of the relay. Written by afluente.request_reprocess only, which makes the ids
-- become visible in their order: the relay's position in Kafka holds the highest id that is answered, and so a request is
-- answered exactly once. `state` is a note for people: `requested` until the relay has said what became of it.
CREATE TABLE afluente.relay_reprocess (
    id               bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    topic_prefix     text NOT NULL,
    organization_id  uuid NOT NULL,
    event_id         uuid NOT NULL,
    event_created_at timestamptz NOT NULL,
    event_type       text NOT NULL,
    state            text NOT NULL CHECK (state IN ('requested', 'answered', 'published', 'dead', 'gone', 'discarded')),
    letter_partition integer NOT NULL,
    letter_offset    bigint NOT NULL,
    letter_at        timestamptz NOT NULL,  -- a topic made anew counts its offsets from 0 again
    requested_by     text NOT NULL,
    requested_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason           text NOT NULL DEFAULT '',
    row_copy         jsonb CHECK (octet_length(row_copy::text) <= 1000000),  -- the letter's, when event_log has dropped it
    answered_at      timestamptz,
    outcome          text,
    CONSTRAINT relay_reprocess_letter UNIQUE (topic_prefix, letter_partition, letter_offset, letter_at)  -- decided about once
);
COMMENT ON TABLE afluente.relay_reprocess IS 'Dead letters of the relay that are to be published again, or are discarded.';
CREATE INDEX relay_reprocess_event ON afluente.relay_reprocess (event_id);  -- what was decided about this event's letters
CREATE INDEX relay_reprocess_open ON afluente.relay_reprocess (id) WHERE state = 'requested';  -- not noted yet
SELECT tenancy.protect('afluente.relay_reprocess');
GRANT SELECT ON afluente.relay_reprocess TO afluente_worker, afluente_admin;
GRANT UPDATE (state, answered_at, outcome, row_copy) ON afluente.relay_reprocess TO afluente_worker;

-- Open transactions of the whole server that have an id, prepared ones included, the oldest first: they are what a
-- position has to remember. With its owner's rights, and narrow: no query text. A login that may not see others' sessions
-- still gets pid and id (pg_locks is open to all). `writes_events`: it has written to event_log, so has rows that only its
-- commit will show.
CREATE FUNCTION afluente.relay_open_transactions(
    OUT tx_id xid8, OUT pid integer, OUT gid text, OUT database_name text, OUT user_name text,
    OUT application_name text, OUT state text, OUT started_at timestamptz, OUT writes_events boolean)
RETURNS SETOF record
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH locks AS MATERIALIZED (
        SELECT l.* FROM pg_locks l WHERE l.granted AND l.mode IN ('ExclusiveLock', 'RowExclusiveLock')
    ), now AS MATERIALIZED (
        SELECT pg_snapshot_xmax(pg_current_snapshot())::text::numeric AS xmax
    ), open AS (
        -- Each savepoint has a lock too; the top level's id is the lowest. Ids in pg_locks have 32 bits.
        SELECT l.virtualtransaction, l.pid,
               min(now.xmax + mod(mod(l.transactionid::text::numeric - mod(now.xmax, 4294967296) + 2147483648 + 4294967296,
                                      4294967296), 4294967296) - 2147483648)::text::xid8 AS tx_id
          FROM locks l, now
         WHERE l.locktype = 'transactionid'
           AND l.mode = 'ExclusiveLock'
         GROUP BY 1, 2
    )
    SELECT o.tx_id, o.pid, p.gid, COALESCE(p.database, a.datname), COALESCE(p.owner, a.usename), a.application_name,
           CASE WHEN p.gid IS NULL THEN a.state ELSE 'prepared' END,
           COALESCE(p.prepared, a.xact_start),
           EXISTS (
               SELECT FROM locks w
                WHERE w.virtualtransaction = o.virtualtransaction
                  AND w.pid IS NOT DISTINCT FROM o.pid
                  AND w.locktype = 'relation'
                  AND w.mode = 'RowExclusiveLock'
                  AND w.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                  AND w.relation IN (SELECT 'public.event_log'::regclass::oid
                                      UNION ALL
                                     SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = 'public.event_log'::regclass))
      FROM open o
      LEFT JOIN pg_stat_activity a ON a.pid = o.pid
      LEFT JOIN pg_prepared_xacts p ON o.pid IS NULL AND p.transaction = o.tx_id::xid
     WHERE o.pid IS DISTINCT FROM pg_backend_pid()
     ORDER BY o.tx_id
$$;
REVOKE ALL ON FUNCTION afluente.relay_open_transactions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.relay_open_transactions() TO afluente_worker;

-- What must hold of this database's settings for the relay: read with the owner's rights, since worker may not ask the
-- sequence. `late_commit`: where synchronous_commit is put under `on` ('' database or role).
CREATE FUNCTION afluente.relay_settings(OUT cache_size bigint, OUT late_commit text[])
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (SELECT s.seqcache FROM pg_sequence s
             WHERE s.seqrelid = pg_get_serial_sequence('public.event_log', 'seq')::regclass),
           ARRAY(SELECT concat_ws(' ', CASE WHEN g.setdatabase <> 0 THEN 'database ' || d.datname END,
                                       CASE WHEN g.setrole <> 0 THEN 'role ' || r.rolname END) || ': ' || c.setting
                   FROM pg_db_role_setting g
                  CROSS JOIN LATERAL unnest(g.setconfig) AS c (setting)
                   LEFT JOIN pg_database d ON d.oid = g.setdatabase
                   LEFT JOIN pg_roles r ON r.oid = g.setrole
                  WHERE c.setting ~ '^synchronous_commit=(off|local|remote_write|false|no|0)$'
                    AND g.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
                  UNION ALL
                 SELECT 'server: synchronous_commit=' || s.reset_val
                   FROM pg_settings s
                  WHERE s.name = 'synchronous_commit'
                    AND s.source NOT IN ('database', 'user', 'database user', 'session', 'client')
                    AND s.reset_val IN ('off', 'local', 'remote_write'))
$$;
REVOKE ALL ON FUNCTION afluente.relay_settings() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.relay_settings() TO afluente_worker;
