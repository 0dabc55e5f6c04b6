-- name: control
-- What a running relay looks at several times a second: is it paused, and is there a dead letter to publish again?
SELECT p.paused_by, p.paused_at, p.reason, COALESCE((SELECT max(r.id) FROM afluente.relay_reprocess r), 0)
  FROM (VALUES (1)) AS one (row)
  LEFT JOIN afluente.relay_pause p ON p.topic_prefix = %(prefix)s AND p.resumed_at IS NULL;

-- name: pause
-- A second pause leaves the first as it is.
INSERT INTO afluente.relay_pause AS p (topic_prefix, paused_by, reason)
VALUES (%(prefix)s, %(by)s, %(reason)s)
    ON CONFLICT (topic_prefix) DO UPDATE
   SET paused_by = EXCLUDED.paused_by, reason = EXCLUDED.reason, paused_at = clock_timestamp(), resumed_at = NULL,
       resumed_by = NULL
 WHERE p.resumed_at IS NOT NULL
RETURNING p.paused_by, p.paused_at, p.reason;

-- name: resume
UPDATE afluente.relay_pause
   SET resumed_at = clock_timestamp(), resumed_by = %(by)s
 WHERE topic_prefix = %(prefix)s
   AND resumed_at IS NULL
RETURNING paused_by, paused_at, reason;

-- name: requests
-- Dead letters that are to be published again, in the order of their requests: whose, not yet what.
SELECT id, organization_id
  FROM afluente.relay_reprocess
 WHERE topic_prefix = %(prefix)s
   AND id > %(after)s
   AND id <= %(upto)s
   AND state <> 'discarded'
 ORDER BY id
 LIMIT %(rows)s;

-- name: requested_rows
-- Their rows as the table has them today, else as the dead letter kept them; without a seq: neither.
SELECT r.id, COALESCE(e.seq, (r.row_copy ->> 'seq')::bigint) AS seq, r.event_id, r.organization_id, r.event_type,
       COALESCE(e.entity_kind, r.row_copy ->> 'entity_kind') AS entity_kind,
       CASE WHEN e.seq IS NOT NULL THEN e.entity_id ELSE (r.row_copy ->> 'entity_id')::uuid END AS entity_id,
       convert_to(COALESCE(e.payload, r.row_copy -> 'payload')::text, 'UTF8') AS payload,
       convert_to(COALESCE(e.metadata, r.row_copy -> 'metadata')::text, 'UTF8') AS metadata,
       r.event_created_at
  FROM afluente.relay_reprocess r
  LEFT JOIN event_log e
    ON e.id = r.event_id
   AND e.created_at = r.event_created_at
   AND e.organization_id = r.organization_id
 WHERE r.id = ANY (%(ids)s)
 ORDER BY r.id;

-- name: note_answers
-- The copy has done its part, and may hold what people can ask to have erased.
UPDATE afluente.relay_reprocess r
   SET state = answer.state, outcome = answer.outcome, answered_at = clock_timestamp(), row_copy = NULL
  FROM jsonb_to_recordset(%(answers)s::jsonb) AS answer (id bigint, state text, outcome text)
 WHERE r.id = answer.id;

-- name: unnoted
-- Requests of which nobody has noted the answer: because it is to come, or because the one who gave it was killed.
SELECT id, organization_id
  FROM afluente.relay_reprocess
 WHERE topic_prefix = %(prefix)s
   AND id <= %(upto)s
   AND state = 'requested'
 ORDER BY id;

-- name: decisions
-- What was decided about the letters of these events.
SELECT event_id, letter_partition, letter_offset, letter_at, id, state, requested_by, requested_at, reason, answered_at, outcome
  FROM afluente.relay_reprocess
 WHERE topic_prefix = %(prefix)s
   AND event_id = ANY (%(events)s)
 ORDER BY id;

-- name: present
-- Which of these events event_log still has.
SELECT e.id
  FROM unnest(%(ids)s::uuid[], %(times)s::timestamptz[]) AS wanted (id, created_at)
  JOIN event_log e
    ON e.id = wanted.id
   AND e.created_at = wanted.created_at;

-- name: request
SELECT afluente.request_reprocess(%(prefix)s, %(action)s, %(organization_id)s, %(event_id)s, %(created_at)s, %(event_type)s,
                                  %(partition)s, %(offset)s, %(at)s, %(by)s, %(reason)s, %(row)s::jsonb);

-- name: lanes
SELECT name, instance, owned_since, extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS silent_s, takeovers,
       kafka_cluster_id
  FROM afluente.relay_lane;

-- name: open_transactions
SELECT tx_id::text::bigint, pid, gid, database_name, user_name, application_name, state, started_at, writes_events
  FROM afluente.relay_open_transactions();

-- name: unseen_since
-- Of the numbers given out since `started_at`, how many belong to no row that can be seen: to rows of open transactions,
-- or of rolled-back ones. Walks back from the newest row, `rows` at most; `reached` says whether that was enough.
SELECT (SELECT last_seq FROM afluente.relay_facts())
           - COALESCE(max(w.seq) FILTER (WHERE w.created_at < %(started_at)s),
                      CASE WHEN count(*) < %(rows)s THEN 0 ELSE min(w.seq) - 1 END)
           - count(*) FILTER (WHERE w.created_at >= %(started_at)s) AS unseen,
       count(*) < %(rows)s OR bool_or(w.created_at < %(started_at)s) AS reached,
       count(*) FILTER (WHERE w.created_at >= %(started_at)s) AS seen
  FROM (SELECT e.seq, e.created_at
          FROM event_log e
         ORDER BY e.seq DESC
         LIMIT %(rows)s) AS w;

-- name: begun_before
-- About when the transaction `tx_id` got its id, when nobody says: ids a little lower belong to rows a little older.
SELECT min(w.created_at)
  FROM (SELECT e.created_at
          FROM event_log e
         WHERE e.tx_id < %(tx_id)s::xid8
         ORDER BY e.tx_id DESC, e.seq DESC
         LIMIT 20) AS w;

-- name: months_held
-- Months that are over and not sealed because a transaction begun before their end is open (ids from `xmin` on).
SELECT count(*)
  FROM event_log_seal
 WHERE sealed_at IS NULL
   AND boundary > %(xmin)s::xid8;

-- name: settings
SELECT cache_size, late_commit FROM afluente.relay_settings();

-- name: months_ahead
-- The end of the last month that has a partition.
SELECT max(to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM') + interval '1 month')::date
  FROM pg_inherits i
  JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = 'public.event_log'::regclass;
