-- name: dead_letters_by_type
-- The events that are dead for at least one worker, counted by type. Read from the deliveries: their partial index holds
-- the dead ones only, where the view would look at every event.
SELECT d.event_type,
       count(DISTINCT d.event_id) AS events,
       count(*) AS deliveries,
       min(d.event_created_at) AS oldest
  FROM event_delivery d
 WHERE d.state IN ('dead', 'needs_review')
 GROUP BY d.event_type
 ORDER BY events DESC, d.event_type;

-- name: dead
-- Dead events of an organization since a time, newest first: the seed's list for inspection.
SELECT s.id, s.event_type, s.entity_kind, s.entity_id, s.attempts, s.last_error, s.consumed_by, s.created_at
  FROM event_log_status s
 WHERE s.organization_id = %(organization_id)s
   AND s.created_at >= %(since)s
   AND s.status = 'dead'
 ORDER BY s.created_at DESC
 LIMIT %(max_rows)s;

-- name: lag
-- How old the oldest event is that some expected worker has not finished, in seconds, by type. `since` bounds the walk.
SELECT s.event_type,
       EXTRACT(epoch FROM clock_timestamp() - min(s.created_at)) AS lag_seconds,
       count(*) AS events
  FROM event_log_status s
 WHERE s.created_at >= %(since)s
   AND s.status IN ('pending', 'processing')
 GROUP BY s.event_type
 ORDER BY lag_seconds DESC;

-- name: status
-- One event with the seed's columns.
SELECT s.id, s.event_type, s.status, s.consumed_by, s.attempts, s.last_error, s.next_attempt_at, s.created_at, s.updated_at
  FROM event_log_status s
 WHERE s.id = %(event_id)s;
