-- name: begin
-- The import of a file's content, begun now or before.
INSERT INTO contact_event_import AS i (organization_id, file_name, file_sha256, batch_rows, options, started_by)
VALUES (%(organization_id)s, %(file_name)s, %(file_sha256)s, %(batch_rows)s, %(options)s, %(started_by)s)
ON CONFLICT (organization_id, file_sha256) DO UPDATE
    SET file_name = i.file_name
RETURNING i.id, i.batch_rows, i.started_at, i.options, i.finished_at;

-- name: restart
-- Read the file again from its first line. What it recorded has its names, and is not recorded twice.
DELETE FROM contact_event_import
 WHERE organization_id = %(organization_id)s
   AND file_sha256 = %(file_sha256)s;

-- name: batches
SELECT batch
  FROM contact_event_import_batch
 WHERE organization_id = %(organization_id)s
   AND import_id = %(import_id)s;

-- name: claim
-- Nobody else's: whoever has the batch under way is waited for, and no row means that it is through.
INSERT INTO contact_event_import_batch (organization_id, import_id, batch, last_line)
VALUES (%(organization_id)s, %(import_id)s, %(batch)s, %(last_line)s)
ON CONFLICT DO NOTHING
RETURNING batch;

-- name: record
-- The staged items as facts; how many were not recorded, as duplicates or not at all, and the latter with their reasons.
SELECT count(*) FILTER (WHERE r.outcome = 'duplicate'),
       count(*) FILTER (WHERE r.contact_created),
       COALESCE(json_agg(json_build_array(r.n, r.reason) ORDER BY r.n) FILTER (WHERE r.outcome = 'rejected'), '[]')
  FROM afluente.record_contact_event_items(
           ARRAY(SELECT s::afluente.contact_event_item
                   FROM (SELECT n, contact_id, phone, phone_as_received, email, contact_external_id, contact_source, name,
                                event_type, metric_name, source, source_type, external_event_id, unique_event_id, object_id,
                                object_id_ref, entity_type, entity_id, value, currency, occurred_at, received_at, properties,
                                raw_payload, integration_id
                           FROM contact_event_staging
                          WHERE n BETWEEN %(first)s AND %(last)s
                          ORDER BY n) s),
           %(create_contacts)s, %(metadata)s, all_outcomes => false) r;

-- name: count
UPDATE contact_event_import_batch
   SET recorded = %(recorded)s,
       duplicates = %(duplicates)s,
       rejected = %(rejected)s,
       contacts_created = %(contacts_created)s,
       errors = %(errors)s,
       committed_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND import_id = %(import_id)s
   AND batch = %(batch)s;

-- name: totals
SELECT COALESCE(sum(recorded), 0)::bigint, COALESCE(sum(duplicates), 0)::bigint, COALESCE(sum(rejected), 0)::bigint,
       COALESCE(sum(contacts_created), 0)::bigint, count(*)
  FROM contact_event_import_batch
 WHERE organization_id = %(organization_id)s
   AND import_id = %(import_id)s;

-- name: errors
-- What was rejected, in the order of the file.
SELECT (e.error ->> 0)::bigint AS line, e.error ->> 1 AS reason
  FROM contact_event_import_batch b
 CROSS JOIN LATERAL jsonb_array_elements(b.errors) WITH ORDINALITY AS e (error, place)
 WHERE b.organization_id = %(organization_id)s
   AND b.import_id = %(import_id)s
   AND b.rejected > 0
 ORDER BY b.batch, e.place;

-- name: finish
-- Once, by whoever was last; what it brought is written to the audit log.
WITH finished AS (
    UPDATE contact_event_import i
       SET finished_at = clock_timestamp()
     WHERE i.organization_id = %(organization_id)s
       AND i.id = %(import_id)s
       AND i.finished_at IS NULL
    RETURNING i.id, i.organization_id, i.file_name, i.file_sha256
)
INSERT INTO audit_logs (organization_id, actor_kind, actor_id, action, entity_kind, entity_id, details)
SELECT f.organization_id, 'system', %(actor)s, 'contact_event.imported', 'contact_event_import', f.id::text,
       jsonb_build_object('file_name', f.file_name, 'file_sha256', encode(f.file_sha256, 'hex'),
                          'recorded', sum(b.recorded), 'duplicates', sum(b.duplicates), 'rejected', sum(b.rejected),
                          'contacts_created', sum(b.contacts_created))
  FROM finished f
  JOIN contact_event_import_batch b ON b.organization_id = f.organization_id AND b.import_id = f.id
 GROUP BY f.id, f.organization_id, f.file_name, f.file_sha256;

-- name: list
-- An organization's imports, newest first, and how far they are.
SELECT i.id, i.file_name, i.started_at, i.finished_at, i.started_by,
       COALESCE(b.last_line, 0) AS last_line, COALESCE(b.recorded, 0) AS recorded, COALESCE(b.duplicates, 0) AS duplicates,
       COALESCE(b.rejected, 0) AS failed, COALESCE(b.contacts_created, 0) AS contacts_created
  FROM contact_event_import i
  LEFT JOIN LATERAL (
      SELECT max(b.last_line) AS last_line, sum(b.recorded) AS recorded, sum(b.duplicates) AS duplicates,
             sum(b.rejected) AS rejected, sum(b.contacts_created) AS contacts_created
        FROM contact_event_import_batch b
       WHERE b.organization_id = i.organization_id
         AND b.import_id = i.id) b ON true
 WHERE i.organization_id = %(organization_id)s
 ORDER BY i.started_at DESC
 LIMIT %(limit)s;
