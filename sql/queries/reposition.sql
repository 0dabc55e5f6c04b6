-- `afluente relay reposition`: what event_log holds, compared with what the topics hold. Run by the login that owns the
-- tables, in one REPEATABLE READ transaction whose first statement is `snapshot`: no writer is waited for, because one that
-- is open then is not in the snapshot, and the relay finds its rows by that.

-- name: owns
-- May this login change event_log?
SELECT pg_has_role(current_user, c.relowner, 'USAGE')
  FROM pg_class c
 WHERE c.oid = 'public.event_log'::regclass;

-- name: lanes
-- Every lane that ever had an owner, of all installations in this database.
SELECT name FROM afluente.relay_lane ORDER BY name;

-- name: make_found
CREATE TEMP TABLE reposition_found (
    id              uuid NOT NULL,
    seq             bigint NOT NULL,
    organization_id uuid,
    event_type      text,
    topic           smallint NOT NULL,
    partition       integer NOT NULL,
    "offset"        bigint NOT NULL,
    at              timestamptz NOT NULL,
    dead            boolean NOT NULL
);

-- name: copy_found
COPY pg_temp.reposition_found (id, seq, organization_id, event_type, topic, partition, "offset", at, dead) FROM STDIN;

-- name: analyze_found
ANALYZE pg_temp.reposition_found;

-- name: snapshot
-- Taken before the transaction has an id of its own: a later snapshot may count that id as ended, and the rows that are
-- restamped with it would never be published. `own`: the id, given at once. `oldest`: before it, months have left the table.
SELECT pg_current_snapshot()::text AS s1,
       pg_current_xact_id()::text::bigint AS own,
       COALESCE((SELECT e.seq FROM event_log e ORDER BY e.seq DESC LIMIT 1), 0) AS t1,
       (SELECT e.id::text FROM event_log e ORDER BY e.seq DESC LIMIT 1) AS witness,
       COALESCE((SELECT min(p.month)::timestamp AT TIME ZONE 'UTC' FROM afluente.event_log_partitions() p), '-infinity') AS oldest,
       COALESCE((SELECT max(r.id) FROM afluente.relay_reprocess r), 0) AS reprocess_top;

-- name: make_missing
CREATE TEMP TABLE reposition_missing (
    id              uuid NOT NULL,
    created_at      timestamptz NOT NULL,
    seq             bigint NOT NULL,
    organization_id uuid NOT NULL,
    event_type      text NOT NULL
) ON COMMIT DROP;

-- name: find_missing
-- Rows that are not on the topics, from `since` on.
INSERT INTO pg_temp.reposition_missing (id, created_at, seq, organization_id, event_type)
SELECT e.id, e.created_at, e.seq, e.organization_id, e.event_type
  FROM event_log e
 WHERE e.created_at >= %(since)s::timestamptz
   AND NOT EXISTS (SELECT FROM pg_temp.reposition_found f WHERE f.id = e.id);

-- name: rows
-- How many rows there are, and how many from before `since`.
SELECT count(*), count(*) FILTER (WHERE e.created_at < %(since)s::timestamptz) FROM event_log e;

-- name: kinds_missing
SELECT DISTINCT organization_id, event_type FROM pg_temp.reposition_missing;

-- name: make_border
CREATE TEMP TABLE reposition_border (
    organization_id uuid NOT NULL,
    event_type      text NOT NULL,
    until           timestamptz NOT NULL,
    below           bigint NOT NULL
) ON COMMIT DROP;

-- name: copy_border
COPY pg_temp.reposition_border (organization_id, event_type, until, below) FROM STDIN;

-- name: assume_published
-- Takes out what would have expired from its topic, if it ever was there. What is above every position never was.
DELETE FROM pg_temp.reposition_missing m
 USING pg_temp.reposition_border b
 WHERE b.organization_id = m.organization_id
   AND b.event_type = m.event_type
   AND m.created_at <= b.until
   AND m.seq < b.below
   AND m.seq <= %(published_at_most)s;

-- name: analyze_missing
ANALYZE pg_temp.reposition_missing;

-- name: missing
SELECT count(*) FROM pg_temp.reposition_missing;

-- name: found
-- Records of ours, of how many events, and their highest seq.
SELECT count(*), count(DISTINCT id), COALESCE(max(seq), 0) FROM pg_temp.reposition_found;

-- name: deferred_published
-- Events that were released and published after the moment that the database was put back to: they wait again.
SELECT count(*)
  FROM deferred_event d
 WHERE EXISTS (SELECT FROM pg_temp.reposition_found f WHERE f.id = d.id);

-- name: release_published
-- They go into the table as what they are, published; the relay would publish them a second time. At the time that their
-- record bears, but never into a sealed month.
WITH published AS (
    DELETE FROM deferred_event d
     USING (SELECT f.id, min(f.at) AS at FROM pg_temp.reposition_found f GROUP BY f.id) f
     WHERE f.id = d.id
    RETURNING d.*, f.at
)
INSERT INTO event_log (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at)
SELECT p.id, p.organization_id, p.event_type, p.entity_kind, p.entity_id, p.payload, p.metadata,
       greatest(p.at, (SELECT max(s.ends_at) FROM event_log_seal s WHERE s.sealed_at IS NOT NULL))
  FROM published p
 ORDER BY p.at, p.id;

-- name: lost
-- Events on the topics that are no longer in the table, each once, where it stands first. Not those whose month has left it.
SELECT DISTINCT ON (f.id) f.id, f.organization_id, f.event_type, f.seq, f.topic, f.partition, f."offset", f.at
  FROM pg_temp.reposition_found f
 WHERE f.at >= %(oldest)s
   AND f.at >= %(since)s::timestamptz
   AND NOT EXISTS (SELECT FROM event_log e WHERE e.id = f.id)
   AND NOT EXISTS (SELECT FROM deferred_event d WHERE d.id = f.id)
 ORDER BY f.id, f.topic, f.partition, f."offset";

-- name: allow
SELECT set_config('afluente.rewrite', 'restamp', true), set_config('synchronous_commit', 'on', true);

-- name: settle
-- Published rows whose transaction s1 does not show: ids of another cluster, which this one will give out some day. They get
-- the first id there is, which every snapshot shows.
-- Unpublished ones too when `everything` is to be published: the relay then begins at the first row, whatever its id.
UPDATE event_log e
   SET tx_id = '3'
 WHERE (e.tx_id >= %(xmax)s::xid8 OR e.tx_id = ANY (%(xip)s::xid8[]))
   AND (%(everything)s OR NOT EXISTS (SELECT FROM pg_temp.reposition_missing m WHERE m.id = e.id));

-- name: restamp
-- Unpublished rows become this transaction's, which s1 does not show: the relay's next window holds them, in the order of seq.
UPDATE event_log e
   SET tx_id = pg_current_xact_id()
  FROM pg_temp.reposition_missing m
 WHERE e.id = m.id
   AND e.created_at = m.created_at;

-- name: reopen
-- Every month is read again until a position shows this transaction: unpublished rows may be in any. Still sealed for writers.
UPDATE event_log_seal SET boundary = (pg_current_xact_id()::text::bigint + 1)::text::xid8;

-- name: close_requests
-- A row that is to be published is not published a second time because somebody asked for it, when it was a dead letter.
UPDATE afluente.relay_reprocess r
   SET state = 'discarded', outcome = 'reposition: its row is published with the others', answered_at = clock_timestamp(),
       row_copy = NULL
 WHERE r.state = 'requested'
   AND r.topic_prefix = %(prefix)s
   AND EXISTS (SELECT FROM pg_temp.reposition_missing m WHERE m.id = r.event_id);

-- name: ask_again
-- With the positions, it is lost which requests to publish a dead letter again were answered. Those whose event is not on an
-- event topic get new numbers, above the one that the new position has.
UPDATE afluente.relay_reprocess r
   SET id = DEFAULT
 WHERE r.state = 'requested'
   AND r.topic_prefix = %(prefix)s
   AND NOT EXISTS (SELECT FROM pg_temp.reposition_found f WHERE f.id = r.event_id AND NOT f.dead);

-- name: sequence
SELECT COALESCE(pg_sequence_last_value(pg_get_serial_sequence('public.event_log', 'seq')::regclass), 0);

-- name: advance
-- Numbers that lost events had are not given out again. One at a time, since writers take theirs meanwhile: a sequence that is
-- set can be set back under what one of them has just got.
SELECT count(nextval(pg_get_serial_sequence('public.event_log', 'seq')::regclass)) FROM generate_series(1, %(count)s::bigint);

-- name: next_transaction
-- What pg_upgrade keeps.
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: absent
-- How many of these records' events are not here.
SELECT count(*)
  FROM pg_temp.reposition_found f
 WHERE f.seq <= %(published_at_most)s
   AND f.at >= %(oldest)s
   AND NOT EXISTS (SELECT FROM event_log e WHERE e.id = f.id);
