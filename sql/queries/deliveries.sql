-- What the worker runtime asks of event_delivery. Many deliveries go in one JSON parameter: no parameter of its own for
-- each row is what makes a batch of 500 cost one round trip and a tenth of the client's time.

-- name: insert_fresh
-- First sight of deliveries. Rows of others are left alone; those inserted here are returned by their number in the input.
-- A transactional worker inserts `done` in the transaction of the effect, an external one `claimed`; with a due time: `waiting`.
WITH input AS (
    SELECT *
      FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
           i integer, event_created_at timestamptz, event_id uuid, target text, organization_id uuid, event_type text,
           key text, generation integer, replay bigint, due timestamptz, kept_key text, kept_value text, kept_headers jsonb)
), inserted AS (
    INSERT INTO event_delivery (
           event_created_at, worker, event_id, target, organization_id, event_type, key, generation, replay, state,
           attempts, claim, claimed_by, next_attempt_at, finished_at, kept_key, kept_value, kept_headers)
    SELECT event_created_at, %(worker)s, event_id, target, organization_id, event_type, key, generation, replay,
           CASE WHEN due IS NOT NULL THEN 'waiting' ELSE %(state)s END,
           CASE WHEN due IS NULL AND %(state)s = 'done' THEN 1 ELSE 0 END,
           1,
           CASE WHEN due IS NULL AND %(state)s = 'claimed' THEN %(process)s::uuid END,
           due,
           CASE WHEN due IS NULL AND %(state)s = 'done' THEN clock_timestamp() END,
           decode(kept_key, 'hex'), decode(kept_value, 'hex'), kept_headers
      FROM input
     ORDER BY event_created_at, event_id, target
        ON CONFLICT DO NOTHING
    RETURNING event_created_at, event_id, target
)
SELECT input.i
  FROM input
  JOIN inserted USING (event_created_at, event_id, target);

-- name: lock_existing
-- The rows of deliveries seen before, locked; `owned` says whether the process that holds the claim is alive.
SELECT input.i, d.state, d.attempts, d.generation, d.claim, d.claimed_by, d.next_attempt_at,
       d.kept_value IS NOT NULL AS kept, d.dead_offset IS NOT NULL AS buried, d.first_failure_at,
       EXISTS (
           SELECT FROM worker_process p
            WHERE p.id = d.claimed_by
              AND p.renewed_at > clock_timestamp() - make_interval(secs => %(takeover_s)s)
       ) AS owned,
       d.error_class, d.last_error, d.replay, d.edited_sha256
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (i integer, event_created_at timestamptz, event_id uuid, target text)
  JOIN event_delivery d
    ON d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target
 ORDER BY d.event_created_at, d.event_id, d.target
   FOR UPDATE OF d;

-- name: again
-- A replay with --again: what was over begins a new life, in nobody's hands yet.
UPDATE event_delivery d
   SET state = 'claimed',
       generation = d.generation + 1,
       replay = input.replay,
       edited_sha256 = NULL,
       attempts = 0,
       claimed_by = NULL,
       next_attempt_at = NULL,
       first_failure_at = NULL,
       dead_partition = NULL,
       dead_offset = NULL,
       kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL,
       finished_at = NULL,
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       event_created_at timestamptz, event_id uuid, target text, replay bigint)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: take
-- Rows seen before are run now: `done` by a transactional worker (in the effect's transaction), `claimed` by an external one.
UPDATE event_delivery d
   SET state = %(state)s,
       attempts = CASE WHEN %(state)s = 'done' THEN input.attempt ELSE d.attempts END,
       claim = d.claim + 1,
       replay = greatest(d.replay, input.replay),
       claimed_by = CASE WHEN %(state)s = 'claimed' THEN %(process)s::uuid END,
       next_attempt_at = NULL,
       finished_at = CASE WHEN %(state)s = 'done' THEN clock_timestamp() END,
       kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL,
       block_order = NULL,
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       i integer, event_created_at timestamptz, event_id uuid, target text, attempt smallint, replay bigint)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target
RETURNING input.i, d.claim;

-- name: put_off
-- Deliveries that did not succeed: waiting, blocked or dead, with what went wrong and, where they wait in Postgres, their bytes.
-- With a claim number the row must still be this process's under that number; without, the caller holds its lock.
WITH input AS MATERIALIZED (
    -- The blocked ones are numbered in the order they are given. Numbered by the update they would be in the join's.
    SELECT given.*, CASE WHEN given.state = 'blocked' THEN nextval('event_delivery_block_order') END AS block_order
      FROM jsonb_to_recordset(%(items)s::jsonb) AS given (
           i integer, event_created_at timestamptz, event_id uuid, target text, state text, attempts smallint, due timestamptz,
           error_class text, error text, failed_at timestamptz, origin_topic text, origin_partition integer,
           origin_offset bigint, kept_key text, kept_value text, kept_headers jsonb, claim integer)
)
UPDATE event_delivery d
   SET state = input.state,
       attempts = input.attempts,
       claimed_by = NULL,
       next_attempt_at = input.due,
       error_class = COALESCE(input.error_class, d.error_class),
       last_error = COALESCE(input.error, d.last_error),
       first_failure_at = CASE WHEN input.error IS NULL THEN d.first_failure_at
                               ELSE COALESCE(d.first_failure_at, input.failed_at) END,
       origin_topic = input.origin_topic,
       origin_partition = input.origin_partition,
       origin_offset = input.origin_offset,
       kept_key = decode(input.kept_key, 'hex'),
       kept_value = decode(input.kept_value, 'hex'),
       kept_headers = input.kept_headers,
       block_order = input.block_order,
       finished_at = CASE WHEN input.state = 'dead' THEN clock_timestamp() END,
       updated_at = clock_timestamp()
  FROM input
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target
   AND (input.claim IS NULL OR (d.state = 'claimed' AND d.claimed_by = %(process)s AND d.claim = input.claim))
RETURNING input.i, d.first_failure_at;

-- name: finish
-- External deliveries are done, if their claim is still this process's.
UPDATE event_delivery d
   SET state = 'done',
       attempts = input.attempt,
       claimed_by = NULL,
       finished_at = clock_timestamp(),
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       i integer, event_created_at timestamptz, event_id uuid, target text, attempt smallint, claim integer)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target
   AND d.state = 'claimed'
   AND d.claimed_by = %(process)s
   AND d.claim = input.claim
RETURNING input.i;

-- name: hand_back
-- A stop: what this process had claimed and did not finish is in nobody's hands again. No attempt is used.
UPDATE event_delivery
   SET claimed_by = NULL,
       updated_at = clock_timestamp()
 WHERE claimed_by = %(process)s
   AND worker = %(worker)s
   AND state = 'claimed';

-- name: lock_events
-- One at a time fixes the targets of an event, whichever member reads it: the second finds the first one's rows.
SELECT count(pg_advisory_xact_lock(hashtextextended('afluente targets ' || %(worker)s, slot)))
  FROM (SELECT slot FROM unnest(%(slots)s::integer[]) AS slot ORDER BY slot) AS slots;

-- name: known_targets
-- The targets that were fixed before. That there were none is no answer to a replay that asks again.
SELECT input.i, array_agg(d.target ORDER BY d.target)
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (i integer, event_created_at timestamptz, event_id uuid, again boolean)
  JOIN event_delivery d
    ON d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
 WHERE NOT (input.again AND d.state = 'skipped')
 GROUP BY input.i;

-- name: fix_targets
-- A row for each target, in nobody's hands yet; for an event without any: one, skipped.
INSERT INTO event_delivery (
       event_created_at, worker, event_id, target, organization_id, event_type, key, state, finished_at)
SELECT event_created_at, %(worker)s, event_id, target, organization_id, event_type, key, state,
       CASE WHEN state = 'skipped' THEN clock_timestamp() END
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       event_created_at timestamptz, event_id uuid, target text, organization_id uuid, event_type text, key text, state text)
 ORDER BY event_created_at, event_id, target
    ON CONFLICT DO NOTHING;

-- name: buried
-- The broker has the dead-letter record.
UPDATE event_delivery
   SET dead_partition = %(partition)s,
       dead_offset = %(offset)s
 WHERE event_created_at = %(event_created_at)s
   AND worker = %(worker)s
   AND event_id = %(event_id)s
   AND target = %(target)s
   AND state IN ('dead', 'needs_review');

-- name: due_kept
-- What waits in Postgres and is due, and what died while it waited: its record comes back, and becomes a dead letter.
-- Locked until it is produced. Another member takes other rows.
SELECT d.event_created_at, d.event_id, d.target, d.organization_id, d.attempts, d.generation, d.next_attempt_at,
       d.kept_key, d.kept_value, d.kept_headers, d.first_failure_at, d.error_class, d.last_error,
       d.origin_topic, d.origin_partition, d.origin_offset
  FROM event_delivery d
 WHERE d.worker = %(worker)s
   AND d.state IN ('waiting', 'dead')
   AND d.kept_value IS NOT NULL
   AND (d.state = 'dead' OR d.next_attempt_at <= %(now)s)
 ORDER BY d.next_attempt_at
 LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED;

-- name: next_kept
-- When the next of them is due.
SELECT min(d.next_attempt_at)
  FROM event_delivery d
 WHERE d.worker = %(worker)s
   AND d.state = 'waiting'
   AND d.kept_value IS NOT NULL;

-- name: no_longer_kept
-- Their records are in retry.now.
UPDATE event_delivery d
   SET kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (event_created_at timestamptz, event_id uuid, target text)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: bury_kept
-- A record that the broker would not take back: its dead letter, a reference to it, is in the topic already.
UPDATE event_delivery
   SET state = 'dead',
       next_attempt_at = NULL,
       error_class = %(error_class)s,
       last_error = %(error)s,
       kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL,
       dead_partition = %(dead_partition)s,
       dead_offset = %(dead_offset)s,
       finished_at = clock_timestamp(),
       updated_at = clock_timestamp()
 WHERE event_created_at = %(event_created_at)s
   AND worker = %(worker)s
   AND event_id = %(event_id)s
   AND target = %(target)s
RETURNING key;

-- name: orphaned
-- Claims of processes that were not renewed for so long, with the event as event_log has it; one that a person has edited
-- is only in Kafka.
SELECT d.event_created_at, d.event_id, d.target, d.claimed_by,
       e.seq, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload::text, e.metadata::text
  FROM event_delivery d
  LEFT JOIN event_log e
    ON e.id = d.event_id
   AND e.created_at = d.event_created_at
   AND d.edited_sha256 IS NULL
 WHERE d.worker = %(worker)s
   AND d.state = 'claimed'
   AND d.claimed_by IS NOT NULL
   AND NOT EXISTS (
       SELECT FROM worker_process p
        WHERE p.id = d.claimed_by
          AND p.renewed_at > clock_timestamp() - make_interval(secs => %(takeover_s)s))
 LIMIT %(limit)s
   FOR UPDATE OF d SKIP LOCKED;

-- name: take_over
-- An orphaned claim waits again, due at once, its record kept with it. Its call may have been made.
UPDATE event_delivery
   SET state = 'waiting',
       claimed_by = NULL,
       next_attempt_at = %(now)s,
       unknown_generation = generation,
       kept_key = %(kept_key)s,
       kept_value = %(kept_value)s,
       kept_headers = %(kept_headers)s::jsonb,
       updated_at = clock_timestamp()
 WHERE event_created_at = %(event_created_at)s
   AND worker = %(worker)s
   AND event_id = %(event_id)s
   AND target = %(target)s;

-- name: lock_keys
-- With ordering by key: whoever begins, fails or finishes a delivery of a key holds its lock, so that none is overlooked.
SELECT count(pg_advisory_xact_lock(hashtextextended('afluente key ' || %(worker)s || ' ' || key, 0)))
  FROM (SELECT key FROM unnest(%(keys)s::text[]) AS key ORDER BY key) AS keys;

-- name: keys_taken
-- Which of these keys have a delivery in front: one that waits, is blocked, or was begun by another process, which may
-- have handed it back. Not those that ask.
SELECT DISTINCT d.key
  FROM event_delivery d
 WHERE d.worker = %(worker)s
   AND d.key = ANY (%(keys)s::text[])
   AND (d.state IN ('waiting', 'blocked')
        OR (d.state = 'claimed' AND d.claim > 0 AND d.claimed_by IS DISTINCT FROM %(process)s))
   AND NOT EXISTS (
       SELECT FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
              event_created_at timestamptz, event_id uuid, target text)
        WHERE d.event_created_at = input.event_created_at
          AND d.event_id = input.event_id
          AND d.target = input.target);

-- name: release_keys
-- The first blocked delivery of each key goes on, unless another of the key is still open in front of it.
UPDATE event_delivery d
   SET state = 'waiting',
       next_attempt_at = %(now)s,
       block_order = NULL,
       updated_at = clock_timestamp()
  FROM (
       SELECT DISTINCT ON (b.key) b.event_created_at, b.event_id, b.target
         FROM event_delivery b
        WHERE b.worker = %(worker)s
          AND b.key = ANY (%(keys)s::text[])
          AND b.state = 'blocked'
          AND NOT EXISTS (
              SELECT FROM event_delivery o
               WHERE o.worker = b.worker
                 AND o.key = b.key
                 AND (o.state = 'waiting' OR (o.state = 'claimed' AND o.claim > 0)))
        ORDER BY b.key, b.block_order
  ) first
 WHERE d.event_created_at = first.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = first.event_id
   AND d.target = first.target
RETURNING d.key;

-- name: reject_waiting
-- The other deliveries of a target that wait are dead. The dead-letter record is made when their retry record comes due;
-- what waits here, with its bytes, is given back for it by `due_kept`.
UPDATE event_delivery
   SET state = 'dead',
       next_attempt_at = NULL,
       error_class = 'Reject',
       last_error = %(reason)s,
       block_order = NULL,
       finished_at = clock_timestamp(),
       updated_at = clock_timestamp()
 WHERE worker = %(worker)s
   AND organization_id = %(organization_id)s
   AND target = %(target)s
   AND event_id <> %(event_id)s
   AND state IN ('waiting', 'blocked');

-- name: undecodable
-- A record whose bytes are no event. Seen again after a crash it is the same row.
INSERT INTO undecodable_record (
       worker, topic, partition, record_offset, record_timestamp, error_class, error, size_bytes, dead_partition, dead_offset)
VALUES (%(worker)s, %(topic)s, %(partition)s, %(offset)s, %(timestamp)s, %(error_class)s, %(error)s, %(size)s,
       %(dead_partition)s, %(dead_offset)s)
    ON CONFLICT DO NOTHING;

-- name: undecodable_known
SELECT true
  FROM undecodable_record
 WHERE worker = %(worker)s
   AND topic = %(topic)s
   AND partition = %(partition)s
   AND record_offset = %(offset)s
   AND record_timestamp = %(timestamp)s;

-- name: register_types
-- The worker says which event types it takes; what it no longer takes is gone.
WITH gone AS (
    DELETE FROM worker_event_types
     WHERE worker = %(worker)s
       AND NOT event_type = ANY (%(event_types)s::text[])
)
INSERT INTO worker_event_types (worker, event_type)
SELECT %(worker)s, event_type
  FROM unnest(%(event_types)s::text[]) AS event_type
    ON CONFLICT DO NOTHING;

-- name: register_process
INSERT INTO worker_process (id, worker, host, pid)
VALUES (%(process)s, %(worker)s, %(host)s, %(pid)s)
    ON CONFLICT (id) DO UPDATE
   SET renewed_at = clock_timestamp();

-- name: forget_process
DELETE FROM worker_process
 WHERE id = %(process)s;

-- name: forget_dead_processes
-- Processes gone for a day, whose claims were taken over long ago.
DELETE FROM worker_process p
 WHERE p.worker = %(worker)s
   AND p.renewed_at < clock_timestamp() - interval '1 day'
   AND NOT EXISTS (SELECT FROM event_delivery d WHERE d.claimed_by = p.id);
