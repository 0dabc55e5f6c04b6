-- Which organizations a worker has parked, and from which offset of a partition on their records wait.

-- name: park
-- Before the group's offset may pass the first record that is left out.
INSERT INTO worker_parked (worker, topic, partition, organization_id, from_offset, process)
VALUES (%(worker)s, %(topic)s, %(partition)s, %(organization_id)s, %(from_offset)s, %(process)s)
    ON CONFLICT (worker, topic, partition, organization_id) DO UPDATE
   SET from_offset = least(worker_parked.from_offset, excluded.from_offset),
       process = excluded.process;

-- name: move
-- What is finished need not be read again. Who has lost the partition since moves nothing.
UPDATE worker_parked
   SET from_offset = greatest(from_offset, %(from_offset)s), passed_over = %(passed_over)s
 WHERE worker = %(worker)s AND topic = %(topic)s AND partition = %(partition)s
   AND organization_id = %(organization_id)s AND process = %(process)s;

-- name: unpark
-- All that was passed over is finished.
DELETE FROM worker_parked
 WHERE worker = %(worker)s AND topic = %(topic)s AND partition = %(partition)s
   AND organization_id = %(organization_id)s AND process = %(process)s;

-- name: take_marks
-- A partition has come to this process, with what is parked on it.
UPDATE worker_parked p
   SET process = %(process)s
  FROM jsonb_to_recordset(%(places)s::jsonb) AS place (topic text, partition integer)
 WHERE p.worker = %(worker)s AND p.topic = place.topic AND p.partition = place.partition
RETURNING p.topic, p.partition, p.organization_id, p.from_offset, p.passed_over;
