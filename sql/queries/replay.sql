-- What a replay asks of event_log and event_delivery. Rows are walked along seq in pages: the first query bounds a page by the
-- rows it looks at, whatever the filters leave of them, so that no statement runs long and no transaction stays open.

-- name: head
-- The fixed end of a replay from the table: what this snapshot shows, up to this seq.
SELECT pg_current_snapshot()::text AS snapshot,
       COALESCE((SELECT e.seq FROM event_log e ORDER BY e.seq DESC LIMIT 1), 0) AS last;

-- name: dropped_until
-- Up to where months of event_log are gone: a month is sealed before its partition may be dropped.
SELECT max(s.ends_at)
  FROM event_log_seal s
 WHERE s.sealed_at IS NOT NULL
   AND to_regclass(format('public.event_log_y%%sm%%s', to_char(s.month, 'YYYY'), to_char(s.month, 'MM'))) IS NULL;

-- name: row_at
-- The first row from a seq on: with created_at nearly in the order of seq, a few of these find where a time begins.
SELECT e.seq, e.created_at
  FROM event_log e
 WHERE e.seq >= %(seq)s
 ORDER BY e.seq
 LIMIT 1;

-- name: first_to_come
-- The lowest seq at or below t1 that a snapshot did not show.
SELECT min(e.seq)
  FROM event_log e
 WHERE e.tx_id >= pg_snapshot_xmin(%(s1)s::pg_snapshot)
   AND e.seq <= %(t1)s
   AND NOT pg_visible_in_snapshot(e.tx_id, %(s1)s::pg_snapshot);

-- name: lowest
SELECT e.seq FROM event_log e ORDER BY e.seq LIMIT 1;

-- name: found
-- The ids that are in the table, in the order they were written.
SELECT e.id FROM event_log e WHERE e.id = ANY (%(ids)s::uuid[]) ORDER BY e.seq;

-- name: reach
-- How far one page may go, and how many rows that is.
SELECT max(s.seq), count(*)
  FROM (SELECT e.seq
          FROM event_log e
         WHERE e.created_at >= %(since)s::timestamptz
           AND e.created_at < %(until)s::timestamptz
           AND e.seq > %(after)s
           AND e.seq <= %(last)s
         ORDER BY e.seq
         LIMIT %(scan)s) s;

-- name: page
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id,
       convert_to(e.payload::text, 'UTF8') AS payload, convert_to(e.metadata::text, 'UTF8') AS metadata, e.created_at,
       e.tx_id::text
  FROM event_log e
 WHERE e.created_at >= %(since)s::timestamptz
   AND e.created_at < %(until)s::timestamptz
   AND e.seq > %(after)s
   AND e.seq <= %(reach)s
   AND pg_visible_in_snapshot(e.tx_id, %(snapshot)s::pg_snapshot)
   AND (%(organizations)s::uuid[] IS NULL OR e.organization_id = ANY (%(organizations)s::uuid[]))
   AND (%(event_types)s::text[] IS NULL OR e.event_type = ANY (%(event_types)s::text[]))
 ORDER BY e.seq
 LIMIT %(rows)s;

-- name: named
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id,
       convert_to(e.payload::text, 'UTF8') AS payload, convert_to(e.metadata::text, 'UTF8') AS metadata, e.created_at,
       e.tx_id::text
  FROM event_log e
 WHERE e.id = ANY (%(ids)s::uuid[])
 ORDER BY e.seq;

-- name: expected
-- Who takes which types.
SELECT w.worker, array_agg(w.event_type) FROM worker_event_types w GROUP BY w.worker ORDER BY w.worker;

-- name: deliveries
-- What workers have done with these events.
SELECT d.worker, d.event_id, d.state, count(*)
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (event_created_at timestamptz, event_id uuid)
  JOIN event_delivery d
    ON d.event_created_at = input.event_created_at
   AND d.event_id = input.event_id
   AND d.worker = ANY (%(workers)s::text[])
 GROUP BY d.worker, d.event_id, d.state;

-- name: known_months
-- The months of which all deliveries are known: their partition is there, and was not made anew after it had been dropped.
SELECT to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM') AS month
  FROM pg_inherits i
  JOIN pg_class c ON c.oid = i.inhrelid
 CROSS JOIN (SELECT m.floor FROM afluente.monthly_partitioned m WHERE m.table_name = 'event_delivery'::regclass) f
 WHERE i.inhparent = 'event_delivery'::regclass
   AND to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM')::timestamp AT TIME ZONE 'UTC' >= f.floor;

-- name: begin
INSERT INTO afluente.relay_replay (id, arguments, actor, reason)
VALUES (%(id)s, %(arguments)s::jsonb, %(actor)s, %(reason)s)
RETURNING number;

-- name: replay
SELECT r.number, r.arguments, r.progress, r.created_at, r.finished_at,
       r.created_at > clock_timestamp() - interval '6 days' AS is_young
  FROM afluente.relay_replay r
 WHERE r.id = %(id)s;

-- name: note_progress
UPDATE afluente.relay_replay
   SET progress = %(progress)s::jsonb, progress_at = clock_timestamp(),
       finished_at = CASE WHEN %(finished)s THEN COALESCE(finished_at, clock_timestamp()) ELSE finished_at END
 WHERE id = %(id)s;

-- name: recent
SELECT r.id::text AS id, r.created_at, r.actor, r.reason, r.arguments ->> 'to' AS "to", r.progress, r.progress_at, r.finished_at
  FROM afluente.relay_replay r
 ORDER BY r.created_at DESC
 LIMIT %(limit)s;
