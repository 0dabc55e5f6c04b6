-- What people ask about dead letters, and what is written when they decide about them. Every filter may be NULL.

-- name: find
-- Dead letters, the newest first. Undecodable records have no organization and no event: `find_undecodable`.
SELECT d.worker, d.event_id, d.target, d.organization_id, d.event_type, d.state, d.attempts, d.generation,
       d.error_class, d.last_error, d.first_failure_at, d.updated_at AS dead_at, d.event_created_at,
       d.origin_topic, d.origin_partition, d.origin_offset, d.dead_partition, d.dead_offset, d.edited_sha256
  FROM event_delivery d
 WHERE d.state = ANY (%(states)s::text[])
   AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
   AND (%(event_id)s::uuid IS NULL OR d.event_id = %(event_id)s)
   AND (%(target)s::text IS NULL OR d.target = %(target)s)
   AND (%(event_type)s::text IS NULL OR d.event_type = %(event_type)s)
   AND (%(organization_id)s::uuid IS NULL OR d.organization_id = %(organization_id)s)
   AND (%(error)s::text IS NULL OR strpos(lower(d.error_class || ': ' || d.last_error), lower(%(error)s)) > 0)
   AND (%(since)s::timestamptz IS NULL OR d.updated_at >= %(since)s)
   AND (%(until)s::timestamptz IS NULL OR d.updated_at < %(until)s)
   AND (%(cause)s::text IS NULL OR %(cause)s = afluente.cause_id(
           d.worker, d.event_type, d.error_class, afluente.error_pattern(COALESCE(d.last_error, ''))))
   AND (%(entity_kind)s::text IS NULL OR EXISTS (
           SELECT FROM event_log e
            WHERE e.id = d.event_id AND e.created_at = d.event_created_at AND e.entity_kind = %(entity_kind)s))
 ORDER BY d.updated_at DESC, d.worker, d.event_id, d.target
 LIMIT %(limit)s;

-- name: find_undecodable
SELECT u.worker, u.topic, u.partition, u.record_offset, u.record_timestamp, u.state, u.error_class, u.error,
       u.created_at AS dead_at, u.dead_partition, u.dead_offset, u.size_bytes
  FROM undecodable_record u
 WHERE u.state = ANY (%(states)s::text[])
   AND (%(worker)s::text IS NULL OR u.worker = %(worker)s)
   AND (%(error)s::text IS NULL OR strpos(lower(u.error_class || ': ' || u.error), lower(%(error)s)) > 0)
   AND (%(since)s::timestamptz IS NULL OR u.created_at >= %(since)s)
   AND (%(until)s::timestamptz IS NULL OR u.created_at < %(until)s)
   AND (%(cause)s::text IS NULL OR %(cause)s = afluente.cause_id(
           u.worker, NULL, u.error_class, afluente.error_pattern(u.error)))
   AND (%(topic)s::text IS NULL OR (u.topic = %(topic)s AND u.partition = %(partition)s AND u.record_offset = %(offset)s))
 ORDER BY u.created_at DESC, u.worker, u.topic, u.partition, u.record_offset
 LIMIT %(limit)s;

-- name: causes
-- Dead letters of both kinds by what they have in common, the most frequent first; not the undecodable ones when a filter
-- asks for what only events have. The pattern is the dear part: thousands of letters often have one and the same text.
WITH letters AS MATERIALIZED (
    SELECT d.worker, d.event_type, d.error_class, COALESCE(d.last_error, '') AS error, d.organization_id,
           COALESCE(d.first_failure_at, d.updated_at) AS first_seen_at, d.updated_at AS dead_at,
           concat_ws(':', d.worker, d.event_id, NULLIF(d.target, '')) AS id
      FROM event_delivery d
     WHERE d.state = ANY (%(states)s::text[])
       AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
       AND (%(event_id)s::uuid IS NULL OR d.event_id = %(event_id)s)
       AND (%(target)s::text IS NULL OR d.target = %(target)s)
       AND (%(event_type)s::text IS NULL OR d.event_type = %(event_type)s)
       AND (%(organization_id)s::uuid IS NULL OR d.organization_id = %(organization_id)s)
       AND (%(error)s::text IS NULL OR strpos(lower(d.error_class || ': ' || d.last_error), lower(%(error)s)) > 0)
       AND (%(since)s::timestamptz IS NULL OR d.updated_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR d.updated_at < %(until)s)
       AND (%(entity_kind)s::text IS NULL OR EXISTS (
               SELECT FROM event_log e
                WHERE e.id = d.event_id AND e.created_at = d.event_created_at AND e.entity_kind = %(entity_kind)s))
     UNION ALL
    SELECT u.worker, NULL, u.error_class, u.error, NULL, u.created_at, u.created_at,
           format('%%s@%%s/%%s/%%s', u.worker, u.topic, u.partition, u.record_offset)
      FROM undecodable_record u
     WHERE %(undecodable)s
       AND u.state = ANY (%(states)s::text[])
       AND (%(worker)s::text IS NULL OR u.worker = %(worker)s)
       AND (%(error)s::text IS NULL OR strpos(lower(u.error_class || ': ' || u.error), lower(%(error)s)) > 0)
       AND (%(since)s::timestamptz IS NULL OR u.created_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR u.created_at < %(until)s)
), patterns AS MATERIALIZED (
    SELECT error, afluente.error_pattern(error) AS pattern
      FROM (SELECT DISTINCT error FROM letters) AS errors
), causes AS (
    SELECT worker, event_type, error_class, pattern,
           count(*) AS letters,
           count(DISTINCT organization_id) AS organizations,
           min(first_seen_at) AS first_seen_at,
           max(dead_at) AS last_seen_at,
           max(id) AS example  -- ids of events ascend: the newest event's
      FROM letters
      JOIN patterns USING (error)
     GROUP BY worker, event_type, error_class, pattern
)
SELECT afluente.cause_id(worker, event_type, error_class, pattern), worker, event_type, error_class, pattern,
       letters, organizations, first_seen_at, last_seen_at, example
  FROM causes
 WHERE %(cause)s::text IS NULL OR %(cause)s = afluente.cause_id(worker, event_type, error_class, pattern)
 ORDER BY letters DESC, last_seen_at DESC, worker, pattern
 LIMIT %(limit)s;

-- name: lock
-- Those of the letters that are still as they were listed, locked until their copies are in retry.now.
SELECT input.i
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       i integer, event_created_at timestamptz, worker text, event_id uuid, target text, generation integer)
  JOIN event_delivery d
    ON d.event_created_at = input.event_created_at
   AND d.worker = input.worker
   AND d.event_id = input.event_id
   AND d.target = input.target
   AND d.generation = input.generation
   AND d.state IN ('dead', 'needs_review')
 ORDER BY d.event_created_at, d.worker, d.event_id, d.target
   FOR UPDATE OF d;

-- name: lock_undecodable
SELECT input.i
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       i integer, worker text, topic text, partition integer, record_offset bigint, record_timestamp timestamptz)
  JOIN undecodable_record u USING (worker, topic, partition, record_offset, record_timestamp)
 WHERE u.state = 'dead'
 ORDER BY worker, topic, partition, record_offset, record_timestamp
   FOR UPDATE OF u;

-- name: reopen
-- A dead letter begins a new life: its copy carries this generation and the first attempt.
UPDATE event_delivery d
   SET state = 'waiting',
       generation = input.generation,
       attempts = 0,
       next_attempt_at = %(now)s,
       finished_at = NULL,
       first_failure_at = NULL,
       dead_partition = NULL,
       dead_offset = NULL,
       kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL,
       edited_sha256 = COALESCE(decode(input.edited, 'hex'), d.edited_sha256),
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       event_created_at timestamptz, worker text, event_id uuid, target text, generation integer, edited text)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = input.worker
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: reserve_generation
-- The generation of an edited copy, before there is one: should its sender die, no later retry has the same number, so that
-- the copy that was left behind is nobody's.
UPDATE event_delivery
   SET generation = generation + 1
 WHERE event_created_at = %(event_created_at)s
   AND worker = %(worker)s
   AND event_id = %(event_id)s
   AND target = %(target)s
   AND generation = %(generation)s
   AND state IN ('dead', 'needs_review')
RETURNING generation;

-- name: discard
UPDATE event_delivery d
   SET state = 'discarded',
       kept_key = NULL,
       kept_value = NULL,
       kept_headers = NULL,
       finished_at = clock_timestamp(),
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       event_created_at timestamptz, worker text, event_id uuid, target text)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = input.worker
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: close_undecodable
-- The caller has locked them.
UPDATE undecodable_record u
   SET state = %(state)s
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       worker text, topic text, partition integer, record_offset bigint, record_timestamp timestamptz)
 WHERE u.worker = input.worker
   AND u.topic = input.topic
   AND u.partition = input.partition
   AND u.record_offset = input.record_offset
   AND u.record_timestamp = input.record_timestamp;

-- name: event_row
-- The event as event_log has it, when its dead-letter record has expired.
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload::text, e.metadata::text, e.created_at
  FROM event_log e
 WHERE e.id = %(event_id)s
   AND e.created_at = %(event_created_at)s;

-- name: standing
-- How a delivery stands, for the one who tried it.
SELECT state, generation, attempts, error_class, last_error, next_attempt_at
  FROM event_delivery
 WHERE event_created_at = %(event_created_at)s
   AND worker = %(worker)s
   AND event_id = %(event_id)s
   AND (%(target)s::text IS NULL OR target = %(target)s);

-- name: is_undecodable
SELECT error_class, error
  FROM undecodable_record
 WHERE worker = %(worker)s
   AND topic = %(topic)s
   AND partition = %(partition)s
   AND record_offset = %(offset)s
   AND state = 'dead';

-- name: audit
INSERT INTO audit_logs (organization_id, actor_kind, actor_id, action, entity_kind, entity_id, details)
SELECT input.organization_id, 'system', %(actor)s, %(action)s, 'event', input.event_id::text, input.details
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (organization_id uuid, event_id uuid, details jsonb);

-- name: audit_undecodable
INSERT INTO undecodable_audit (worker, topic, partition, record_offset, record_timestamp, action, actor, details)
SELECT input.worker, input.topic, input.partition, input.record_offset, input.record_timestamp, %(action)s, %(actor)s,
       input.details
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       worker text, topic text, partition integer, record_offset bigint, record_timestamp timestamptz, details jsonb);

-- name: history
-- What people have done with a delivery, the first first.
SELECT a.created_at, a.actor_id, a.action, a.details
  FROM audit_logs a
 WHERE a.organization_id = %(organization_id)s
   AND a.entity_kind = 'event'
   AND a.entity_id = %(event_id)s::text
   AND a.action LIKE 'dead\_letter.%%'
   AND a.details ->> 'worker' = %(worker)s
   AND a.details ->> 'target' = %(target)s
 ORDER BY a.created_at;

-- name: history_of_undecodable
SELECT a.created_at, a.actor, a.action, a.details
  FROM undecodable_audit a
 WHERE a.worker = %(worker)s
   AND a.topic = %(topic)s
   AND a.partition = %(partition)s
   AND a.record_offset = %(record_offset)s
   AND a.record_timestamp = %(record_timestamp)s
 ORDER BY a.created_at;

-- name: causes_of
-- The cause of each of these errors, in their order.
SELECT afluente.cause_id(e.worker, e.event_type, e.error_class, e.pattern), e.pattern
  FROM (
       SELECT n, worker, event_type, error_class, afluente.error_pattern(error) AS pattern
         FROM unnest(%(workers)s::text[], %(types)s::text[], %(classes)s::text[], %(errors)s::text[])
              WITH ORDINALITY AS given (worker, event_type, error_class, error, n)
  ) e
 ORDER BY e.n;
