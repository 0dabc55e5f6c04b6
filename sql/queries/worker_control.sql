-- name: paused
-- The pause that is in force for a worker. Each of its processes asks once a second.
SELECT paused_by, paused_at, reason
  FROM worker_control
 WHERE worker = %(worker)s
   AND resumed_at IS NULL;

-- name: all_paused
SELECT worker, paused_by, paused_at, reason
  FROM worker_control
 WHERE resumed_at IS NULL;

-- name: pause
-- A second pause leaves the first as it is.
INSERT INTO worker_control (worker, paused_by, reason)
VALUES (%(worker)s, %(by)s, %(reason)s)
    ON CONFLICT (worker) WHERE resumed_at IS NULL DO NOTHING
RETURNING paused_by, paused_at, reason;

-- name: resume
UPDATE worker_control
   SET resumed_at = clock_timestamp(), resumed_by = %(by)s
 WHERE worker = %(worker)s
   AND resumed_at IS NULL
RETURNING paused_by, paused_at, reason;

-- name: until_turn
-- Seconds until the periodic hook is due again; no row: it never ran. A look only, since take_turn writes.
SELECT greatest(0, extract(epoch FROM last_run_at - clock_timestamp()) + %(every_s)s)::float8
  FROM worker_periodic
 WHERE worker = %(worker)s;

-- name: take_turn
-- Is the periodic hook due? The row is locked for the one whose turn it is, until its effects are committed; another
-- member that asks meanwhile gets nothing. The clock is the database's: members' clocks differ.
INSERT INTO worker_periodic AS p (worker, last_run_at, last_run_by)
SELECT %(worker)s, clock_timestamp(), %(process)s
 WHERE pg_try_advisory_xact_lock(hashtextextended('worker_periodic ' || %(worker)s, 0))
    ON CONFLICT (worker) DO UPDATE
   SET last_run_at = EXCLUDED.last_run_at, last_run_by = EXCLUDED.last_run_by
 WHERE p.last_run_at <= EXCLUDED.last_run_at - make_interval(secs => %(every_s)s)
RETURNING p.last_run_at;

-- name: processes
-- The living processes of one worker, or of all.
SELECT worker, id, host, pid, started_at, extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS silent_s
  FROM worker_process
 WHERE renewed_at > clock_timestamp() - interval '5 minutes'
   AND (%(worker)s::text IS NULL OR worker = %(worker)s)
 ORDER BY worker, started_at, id;

-- name: known
-- Every worker that has ever told the database of itself.
SELECT worker FROM worker_event_types
 UNION
SELECT worker FROM worker_process
 UNION
SELECT worker FROM worker_control;

-- name: open_deliveries
-- How many deliveries of a worker are in each state that is not the end, `rows` counted at most of the ones that will go
-- on and of the dead each; the oldest event among them; how many of the waiting ones are due, and when the next one is.
SELECT state, count(*), min(event_created_at), count(*) FILTER (WHERE next_attempt_at <= clock_timestamp()),
       min(next_attempt_at)
  FROM (
       (SELECT state, next_attempt_at, event_created_at
          FROM event_delivery
         WHERE worker = %(worker)s
           AND state IN ('claimed', 'waiting', 'blocked')
         LIMIT %(rows)s)
        UNION ALL
       (SELECT state, NULL, event_created_at
          FROM event_delivery
         WHERE worker = %(worker)s
           AND state IN ('dead', 'needs_review')
         LIMIT %(rows)s)
       ) AS open
 GROUP BY state;

-- name: dead_by_type
-- Open dead letters of a worker by event type, `rows` counted at most.
SELECT event_type, count(*)
  FROM (SELECT event_type
          FROM event_delivery
         WHERE worker = %(worker)s
           AND state IN ('dead', 'needs_review')
         LIMIT %(rows)s) AS dead
 GROUP BY event_type;

-- name: parked
-- What each worker has parked: how many organizations, about how many records, and since when.
SELECT worker, count(DISTINCT organization_id), sum(passed_over)::bigint, min(parked_at)
  FROM worker_parked
 GROUP BY worker;

-- name: open_breakers
-- How many destinations of a worker are left alone now.
SELECT count(*)
  FROM worker_breaker
 WHERE worker = %(worker)s
   AND open_until IS NOT NULL;
