-- Rates and breakers of external workers, as consumers/runtime/admission.py asks for them. The server's clock counts, so
-- that members whose clocks differ keep one rate.

-- name: read_marks
-- What is noted of deliveries that were seen before, locked by the claim: did they wait here already, and may a call have
-- been made of which nobody knows what came? So it is where one was claimed, and never recorded.
SELECT input.i, d.error_class IS NOT NULL AS waited, extract(epoch FROM d.rate_at)::float8,
       COALESCE(d.unknown_generation = d.generation, false) AS marked, d.state = 'claimed' AND d.claim > 0 AS begun
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (i integer, event_created_at timestamptz, event_id uuid, target text)
  JOIN event_delivery d
    ON d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: write_marks
UPDATE event_delivery d
   SET rate_at = to_timestamp(input.moment),
       unknown_generation = CASE WHEN input.unknown THEN d.generation END
  FROM jsonb_to_recordset(%(items)s::jsonb) AS input (
       event_created_at timestamptz, event_id uuid, target text, moment float8, unknown boolean)
 WHERE d.event_created_at = input.event_created_at
   AND d.worker = %(worker)s
   AND d.event_id = input.event_id
   AND d.target = input.target;

-- name: lock_buckets
-- The buckets, made at first sight, locked until the end of the transaction; and the time, in seconds since the epoch.
INSERT INTO worker_rate AS r (worker, organization_id, bucket)
SELECT %(worker)s, organization_id, bucket
  FROM jsonb_to_recordset(%(buckets)s::jsonb) AS input (organization_id uuid, bucket text)
 ORDER BY organization_id, bucket
    ON CONFLICT (worker, organization_id, bucket) DO UPDATE
   SET next_at = r.next_at
RETURNING organization_id, bucket, extract(epoch FROM next_at)::float8, extract(epoch FROM booked_at)::float8,
          extract(epoch FROM clock_timestamp())::float8;

-- name: move_buckets
-- Where they stand after this transaction's calls.
UPDATE worker_rate r
   SET next_at = to_timestamp(input.next_at),
       booked_at = to_timestamp(input.booked_at)
  FROM jsonb_to_recordset(%(buckets)s::jsonb) AS input (
       organization_id uuid, bucket text, next_at float8, booked_at float8)
 WHERE r.worker = %(worker)s
   AND r.organization_id = input.organization_id
   AND r.bucket = input.bucket;

-- name: delay_buckets
-- The last moments that were given are so much later after all; nobody was given one since, the rows are locked.
UPDATE worker_rate r
   SET next_at = r.next_at + make_interval(secs => input.seconds),
       booked_at = greatest(r.booked_at, r.next_at + make_interval(secs => input.seconds))
  FROM jsonb_to_recordset(%(buckets)s::jsonb) AS input (organization_id uuid, bucket text, seconds float8)
 WHERE r.worker = %(worker)s
   AND r.organization_id = input.organization_id
   AND r.bucket = input.bucket;

-- name: server_time
SELECT extract(epoch FROM clock_timestamp())::float8;

-- name: forget_idle_buckets
-- A bucket whose moments are long past says nothing that a new one would not.
DELETE FROM worker_rate r
 USING (
       SELECT worker, organization_id, bucket
         FROM worker_rate
        WHERE worker = %(worker)s
          AND booked_at < clock_timestamp() - interval '1 day'
        LIMIT 1000
          FOR UPDATE SKIP LOCKED
 ) idle
 WHERE r.worker = idle.worker
   AND r.organization_id = idle.organization_id
   AND r.bucket = idle.bucket;

-- name: lock_open_breakers
-- Those of these destinations that are not closed. Closed ones are not locked: nothing is decided about them.
SELECT b.destination, b.failures, b.opened_count, b.open_until, b.probe_by, b.probe_until, b.error_class, b.last_error,
       clock_timestamp()
  FROM worker_breaker b
 WHERE b.worker = %(worker)s
   AND b.destination = ANY (%(destinations)s::text[])
   AND b.open_until IS NOT NULL
 ORDER BY b.destination
   FOR UPDATE;

-- name: open_breakers
-- For people: which destinations are left alone, of all workers.
SELECT worker, destination, open_until, opened_count, COALESCE(probe_until > clock_timestamp(), false) AS probing,
       error_class, last_error
  FROM worker_breaker
 WHERE open_until IS NOT NULL
 ORDER BY worker, destination;

-- name: lock_breakers
-- The rows that these outcomes may change: of a destination that failed, made at first sight; of one that did not, only if
-- it is not as good as new.
WITH failed AS (
    INSERT INTO worker_breaker AS b (worker, destination)
    SELECT %(worker)s, destination
      FROM unnest(%(failed)s::text[]) AS destination
     ORDER BY destination
        ON CONFLICT (worker, destination) DO UPDATE
       SET failures = b.failures
    RETURNING b.destination, b.failures, b.opened_count, b.open_until, b.probe_by, b.probe_until, b.error_class, b.last_error
), other AS (
    SELECT b.destination, b.failures, b.opened_count, b.open_until, b.probe_by, b.probe_until, b.error_class, b.last_error
      FROM worker_breaker b
     WHERE b.worker = %(worker)s
       AND b.destination = ANY (%(others)s::text[])
       AND (b.failures > 0 OR b.open_until IS NOT NULL)
     ORDER BY b.destination
       FOR UPDATE
)
SELECT failed.*, clock_timestamp() FROM failed
 UNION ALL
SELECT other.*, clock_timestamp() FROM other;

-- name: write_breakers
UPDATE worker_breaker b
   SET failures = input.failures,
       opened_count = input.opened_count,
       open_until = input.open_until,
       probe_by = input.probe_by,
       probe_until = input.probe_until,
       error_class = COALESCE(input.error_class, b.error_class),
       last_error = COALESCE(input.error, b.last_error),
       updated_at = clock_timestamp()
  FROM jsonb_to_recordset(%(breakers)s::jsonb) AS input (
       destination text, failures integer, opened_count integer, open_until timestamptz, probe_by uuid,
       probe_until timestamptz, error_class text, error text)
 WHERE b.worker = %(worker)s
   AND b.destination = input.destination;
