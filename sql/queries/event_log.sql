-- name: request
-- All of request X, in order: what was audited and what was emitted. Row-level security applies.
SELECT 'audit' AS src, a.id, a.organization_id, a.action AS what, a.entity_kind, a.entity_id, a.created_at
  FROM audit_logs a
 WHERE a.request_id = %(request_id)s
 UNION ALL
SELECT 'event', e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id::text, e.created_at
  FROM event_log e
 WHERE e.request_id = %(request_id)s
 ORDER BY created_at, id;

-- name: trace
-- The same by trace id.
SELECT 'audit' AS src, a.id, a.organization_id, a.action AS what, a.entity_kind, a.entity_id, a.created_at
  FROM audit_logs a
 WHERE a.trace_id = %(trace_id)s
 UNION ALL
SELECT 'event', e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id::text, e.created_at
  FROM event_log e
 WHERE e.trace_id = %(trace_id)s
 ORDER BY created_at, id;

-- name: entity
-- One thing's history, newest first: its events, at most max_rows.
SELECT e.seq, e.id, e.organization_id, e.event_type, e.payload, e.metadata, e.created_at
  FROM event_log e
 WHERE e.entity_kind = %(entity_kind)s
   AND e.entity_id = %(entity_id)s
 ORDER BY e.created_at DESC, e.seq DESC
 LIMIT %(max_rows)s;

-- name: of_type
-- An organization's events of one type in [since, until), newest first, at most max_rows.
SELECT e.seq, e.id, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
  FROM event_log e
 WHERE e.organization_id = %(organization_id)s
   AND e.event_type = %(event_type)s
   AND e.created_at >= %(since)s
   AND e.created_at < %(until)s
 ORDER BY e.created_at DESC, e.seq DESC
 LIMIT %(max_rows)s;

-- name: by_id
-- Events by their ids, in the order they were written.
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
  FROM event_log e
 WHERE e.id = ANY (%(ids)s)
 ORDER BY e.seq;
