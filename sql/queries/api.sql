-- name: act
-- For the rest of the transaction: the application of one organization, which waits for nobody's lock for long.
SELECT set_config('role', 'afluente_app', true),
       set_config('app.organization_id', %(organization_id)s, true),
       set_config('lock_timeout', %(lock_timeout)s, true),
       set_config('statement_timeout', %(statement_timeout)s, true);

-- name: claim
INSERT INTO api_idempotency (organization_id, key, request_hash)
VALUES (%(organization_id)s, %(key)s, %(request_hash)s)
    ON CONFLICT ON CONSTRAINT api_idempotency_pkey DO NOTHING
RETURNING key;

-- name: claimed
SELECT i.request_hash, i.status, i.answer
  FROM api_idempotency i
 WHERE i.organization_id = %(organization_id)s
   AND i.key = %(key)s;

-- name: answered
UPDATE api_idempotency
   SET status = %(status)s,
       answer = %(answer)s
 WHERE organization_id = %(organization_id)s
   AND key = %(key)s;

-- name: emit
-- Events in the order of the lists, as emit_event takes and refuses them; their ids in that order.
SELECT emit_event(i.event_type, i.entity_kind, i.entity_id, i.payload, i.metadata, NULL, i.deliver_at)
  FROM unnest(%(event_type)s::text[], %(entity_kind)s::text[], %(entity_id)s::uuid[], %(payload)s::jsonb[],
              %(metadata)s::jsonb[], %(deliver_at)s::timestamptz[])
       WITH ORDINALITY AS i (event_type, entity_kind, entity_id, payload, metadata, deliver_at, place);

-- name: emitted_here
-- Which of these events this transaction wrote: the others were there before. A deferred one has no transaction's number;
-- of two requests that bring it at the same moment both may hear that theirs did.
SELECT e.id
  FROM event_log e
 WHERE e.tx_id = pg_current_xact_id()
   AND e.created_at >= now()
 UNION ALL
SELECT d.id
  FROM deferred_event d
 WHERE d.id = ANY (%(ids)s)
   AND d.created_at >= now();

-- name: event
-- One event with the seed's status. `since`: when its id was made, before which no row of it can be.
SELECT s.id, s.event_type, s.entity_kind, s.entity_id, s.payload::text, s.metadata::text, s.created_at, s.status, s.attempts
  FROM event_log_status s
 WHERE s.id = %(id)s
   AND s.created_at >= %(since)s;

-- name: deliveries
-- What became of an event, by worker and target. No error texts: they may quote what they failed on.
SELECT d.worker, d.target, d.state, d.attempts, d.next_attempt_at, d.finished_at, d.updated_at
  FROM event_delivery d
 WHERE d.event_created_at = %(created_at)s
   AND d.event_id = %(id)s
 ORDER BY d.worker, d.target;

-- name: deferred
SELECT d.id, d.event_type, d.entity_kind, d.entity_id, d.payload::text, d.metadata::text, d.created_at, d.deliver_at
  FROM deferred_event d
 WHERE d.id = %(id)s;

-- name: cancel
SELECT cancel_deferred(%(id)s);

-- name: record
-- Contact events in their order, the people that nobody knows made contacts.
SELECT r.contact_event_id, r.outcome, r.reason
  FROM record_contact_events(%(events)s::json, create_contacts => true, metadata => %(metadata)s) r
 ORDER BY r.n;
