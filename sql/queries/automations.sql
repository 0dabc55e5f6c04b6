-- name: started_by
-- The automations that an event starts, by its metric or its type: those that were on when it was emitted.
SELECT a.id
  FROM automations a
 WHERE a.organization_id = %(organization_id)s
   AND a.status = 'enabled'
   AND COALESCE(a.enabled_at, '-infinity') <= %(emitted_at)s
   AND (a.trigger_metric = %(metric)s OR a.trigger_event_type = ANY (%(event_types)s))
 ORDER BY a.created_at, a.id;

-- name: webhook_triggers
-- The automations that a delivery that came in may start: those that were on then; their triggers say which deliveries.
SELECT a.id, v.definition
  FROM automations a
  JOIN automation_versions v ON v.organization_id = a.organization_id AND v.automation_id = a.id AND v.version = a.version
 WHERE a.organization_id = %(organization_id)s
   AND a.status = 'enabled'
   AND COALESCE(a.enabled_at, '-infinity') <= %(emitted_at)s
   AND a.trigger_metric = '__webhook__'
 ORDER BY a.created_at, a.id;

-- name: hold_automation
-- Whoever switches it on or off, or edits it, waits until this transaction ends, or is waited for: a statement of its own,
-- so that the next one sees what that came to.
SELECT FROM automations
 WHERE organization_id = %(organization_id)s
   AND id = %(automation_id)s
   FOR KEY SHARE;

-- name: hold_automation_of_run
SELECT FROM automations
 WHERE organization_id = %(organization_id)s
   AND id = (SELECT automation_id FROM automation_runs WHERE organization_id = %(organization_id)s AND id = %(run_id)s)
   FOR KEY SHARE;

-- name: automation
-- An automation with its newest version, and its organization's time zone.
SELECT a.id, a.name, a.status, a.version, v.definition, o.timezone
  FROM automations a
  JOIN automation_versions v ON v.organization_id = a.organization_id AND v.automation_id = a.id AND v.version = a.version
  JOIN organizations o ON o.id = a.organization_id
 WHERE a.organization_id = %(organization_id)s
   AND a.id = %(automation_id)s;

-- name: contact
-- A contact as it is now, or the one it was merged into, with its tags.
WITH RECURSIVE person AS (
    SELECT c.*, 1 AS steps
      FROM contacts c
     WHERE c.organization_id = %(organization_id)s AND c.id = %(contact_id)s
     UNION ALL
    SELECT c.*, p.steps + 1
      FROM person p
      JOIN contacts c ON c.organization_id = p.organization_id AND c.id = p.merged_into
     WHERE p.steps < 10
)
SELECT p.id, p.name, p.phone_e164, p.email, p.source, p.subscriber_state, p.created_at, p.anonymized_at,
       ARRAY(SELECT t.name
               FROM contact_tag_links l
               JOIN tags t ON t.organization_id = l.organization_id AND t.id = l.tag_id
              WHERE l.organization_id = p.organization_id AND l.contact_id = p.id
              ORDER BY t.name) AS tags,
       EXISTS (SELECT FROM contact_identities i
                WHERE i.organization_id = p.organization_id AND i.contact_id = p.id
                  AND (i.kind = 'phone' OR i.source = 'whatsapp')) AS is_reachable
  FROM person p
 WHERE p.merged_into IS NULL;

-- name: contact_of_entity
-- Whom a lead, a conversation or an order is about.
SELECT contact_id FROM leads WHERE organization_id = %(organization_id)s AND id = %(entity_id)s AND %(entity_kind)s = 'lead'
 UNION ALL
SELECT contact_id FROM conversations
 WHERE organization_id = %(organization_id)s AND id = %(entity_id)s AND %(entity_kind)s = 'conversation'
 UNION ALL
SELECT contact_id FROM orders WHERE organization_id = %(organization_id)s AND id = %(entity_id)s AND %(entity_kind)s = 'order';

-- name: contact_of_webhook
-- Whom the facts of a delivery that came in are about.
SELECT contact_id
  FROM contact_events
 WHERE organization_id = %(organization_id)s
   AND webhook_event_id = %(webhook_event_id)s
 ORDER BY created_at, id
 LIMIT 1;

-- name: contact_of_identity
SELECT contact_id
  FROM contact_identities
 WHERE organization_id = %(organization_id)s
   AND kind = %(kind)s
   AND source = ''
   AND value = %(value)s;

-- name: webhook_status
-- `sender`: of a generic connection the name in its mapping.
SELECT w.status, w.channel_id, CASE WHEN w.source = 'generic' THEN c.external_id END AS sender
  FROM webhook_events w
  LEFT JOIN channels c ON c.organization_id = w.organization_id AND c.id = w.channel_id
 WHERE w.organization_id = %(organization_id)s
   AND w.id = %(webhook_event_id)s;

-- name: message
SELECT body, message_type, direction, conversation_id
  FROM messages
 WHERE organization_id = %(organization_id)s
   AND id = %(message_id)s;

-- name: runs_behind
-- When the runs of this automation for this contact began that are in the chain of causes of an event. The chain is
-- followed event by event; the id of an event says when it was given out, so only the months since then are probed.
WITH RECURSIVE chain (cause, run, before, steps) AS (
    SELECT %(causation_id)s::uuid, %(automation_run)s::uuid, %(created_at)s::timestamptz, 1
     UNION ALL
    SELECT CASE WHEN pg_input_is_valid(e.metadata ->> 'causation_id', 'uuid') THEN (e.metadata ->> 'causation_id')::uuid END,
           CASE WHEN pg_input_is_valid(e.metadata ->> 'automation_run', 'uuid') THEN (e.metadata ->> 'automation_run')::uuid END,
           e.created_at, c.steps + 1
      FROM chain c
      JOIN event_log e
        ON e.id = c.cause
       AND e.created_at >= COALESCE(uuid_extract_timestamp(c.cause), '-infinity') - interval '1 day'
       AND e.created_at <= c.before + interval '1 day'
     WHERE c.steps <= %(depth)s
)
SELECT r.started_at
  FROM chain c
  JOIN automation_runs r
    ON r.organization_id = %(organization_id)s
   AND r.id = c.run
 WHERE r.automation_id = %(automation_id)s
   AND (r.contact_id IS NOT DISTINCT FROM %(contact_id)s
        OR EXISTS (SELECT FROM contacts m
                    WHERE m.organization_id = r.organization_id AND m.id = r.contact_id
                      AND m.merged_into = %(contact_id)s));

-- name: begin_run
-- No row when this event has started this automation before.
INSERT INTO automation_runs (organization_id, automation_id, version, contact_id, trigger_event_id, trigger_event_type,
                             causation_depth, request_id, trace_id, traceparent, state, reason, started_at, updated_at,
                             finished_at)
VALUES (%(organization_id)s, %(automation_id)s, %(version)s, %(contact_id)s, %(trigger_event_id)s, %(trigger_event_type)s,
        %(causation_depth)s, %(request_id)s, %(trace_id)s, %(traceparent)s, %(state)s, %(reason)s, %(now)s, %(now)s,
        %(finished_at)s)
ON CONFLICT (organization_id, automation_id, trigger_event_id) DO NOTHING
RETURNING id;

-- name: open_run
-- A run that is to go on, locked, with the version that it began with.
SELECT r.id, r.automation_id, r.version, r.contact_id, r.trigger_event_id, r.trigger_event_type, r.causation_depth,
       r.request_id, r.trace_id, r.traceparent, r.state, r.position, r.context, a.name, a.status, v.definition,
       o.timezone
  FROM automation_runs r
  JOIN automations a ON a.organization_id = r.organization_id AND a.id = r.automation_id
  JOIN automation_versions v
    ON v.organization_id = r.organization_id AND v.automation_id = r.automation_id AND v.version = r.version
  JOIN organizations o ON o.id = r.organization_id
 WHERE r.organization_id = %(organization_id)s
   AND r.id = %(run_id)s
   FOR UPDATE OF r;

-- name: set_run
UPDATE automation_runs
   SET state = %(state)s,
       reason = %(reason)s,
       position = %(position)s,
       wake_at = %(wake_at)s,
       wake_event_id = %(wake_event_id)s,
       context = %(context)s,
       updated_at = %(now)s,
       finished_at = %(finished_at)s
 WHERE organization_id = %(organization_id)s
   AND id = %(run_id)s;

-- name: hold_run
UPDATE automation_runs
   SET state = 'held',
       updated_at = %(now)s
 WHERE organization_id = %(organization_id)s
   AND id = %(run_id)s;

-- name: set_step
-- What a step did, or does. A later word about it replaces the earlier one.
INSERT INTO automation_step_runs (organization_id, run_id, step, type, state, reason, attempt, wake_at, error, effect_id,
                                  outcome, details, started_at, finished_at)
VALUES (%(organization_id)s, %(run_id)s, %(step)s, %(type)s, %(state)s, %(reason)s, %(attempt)s, %(wake_at)s, %(error)s,
        %(effect_id)s, %(outcome)s, %(details)s, %(now)s, %(finished_at)s)
ON CONFLICT (organization_id, run_id, step) DO UPDATE
    SET state = excluded.state,
        reason = excluded.reason,
        attempt = excluded.attempt,
        wake_at = COALESCE(excluded.wake_at, automation_step_runs.wake_at),
        error = excluded.error,
        details = automation_step_runs.details || excluded.details,
        finished_at = excluded.finished_at;

-- name: step
SELECT state, attempt, error, details
  FROM automation_step_runs
 WHERE organization_id = %(organization_id)s
   AND run_id = %(run_id)s
   AND step = %(step)s;

-- name: end_open_steps
UPDATE automation_step_runs
   SET state = 'cancelled',
       reason = %(reason)s,
       finished_at = %(now)s
 WHERE organization_id = %(organization_id)s
   AND run_id = %(run_id)s
   AND state IN ('waiting', 'calling');

-- name: step_of_effect
SELECT s.run_id, s.step, s.type, s.details, r.automation_id, r.contact_id, r.request_id, r.trace_id
  FROM automation_step_runs s
  JOIN automation_runs r ON r.organization_id = s.organization_id AND r.id = s.run_id
 WHERE s.organization_id = %(organization_id)s
   AND s.effect_id = %(effect_id)s;

-- name: set_outcome
-- What became of a step's effect. Sent is the last word: a message that failed may still be sent by another attempt.
UPDATE automation_step_runs
   SET outcome = %(outcome)s,
       outcome_at = %(at)s,
       error = %(error)s
 WHERE organization_id = %(organization_id)s
   AND run_id = %(run_id)s
   AND step = %(step)s
   AND outcome IS DISTINCT FROM 'sent'
RETURNING step;

-- name: sending_channel
-- Where a contact is written to: the channel that is named, or that of its latest conversation, or the only one there is.
SELECT c.id
  FROM channels c
 WHERE c.organization_id = %(organization_id)s
   AND c.kind = 'whatsapp'
   AND c.status = 'active'
   AND c.id = COALESCE(
       %(channel)s,
       (SELECT v.channel_id
          FROM conversations v
          JOIN channels k ON k.organization_id = v.organization_id AND k.id = v.channel_id
         WHERE v.organization_id = %(organization_id)s
           AND v.contact_id = %(contact_id)s
           AND k.kind = 'whatsapp'
           AND k.status = 'active'
         ORDER BY v.status = 'open' DESC, v.opened_at DESC
         LIMIT 1),
       (SELECT min(k.id::text)::uuid
          FROM channels k
         WHERE k.organization_id = %(organization_id)s
           AND k.kind = 'whatsapp'
           AND k.status = 'active'
        HAVING count(*) = 1));

-- name: open_conversation
SELECT conversation_id
  FROM open_conversation(%(contact_id)s, %(channel_id)s, source => 'automation',
                         metadata => %(metadata)s, properties => %(properties)s);

-- name: queue_message
INSERT INTO messages (id, organization_id, conversation_id, contact_id, direction, message_type, body, template_id, status,
                      metadata, occurred_at)
VALUES (%(id)s, %(organization_id)s, %(conversation_id)s, %(contact_id)s, 'out', %(message_type)s, %(body)s,
        %(template_id)s, 'queued', %(metadata)s, %(now)s);

-- name: create_link
SELECT create_tracked_link(%(url)s, %(contact_id)s, %(run_id)s, %(step)s, %(message_id)s, %(token)s);

-- name: template
-- A template by its name; that of the channel before one that belongs to none.
SELECT id, status, components
  FROM templates
 WHERE organization_id = %(organization_id)s
   AND name = %(name)s
   AND language = %(language)s
   AND (channel_id = %(channel_id)s OR channel_id IS NULL)
 ORDER BY channel_id NULLS LAST
 LIMIT 1;

-- name: add_tag
SELECT add_tag(%(contact_id)s, %(tag)s, 'automation', %(metadata)s, %(properties)s);

-- name: remove_tag
SELECT remove_tag(%(contact_id)s, %(tag)s, 'automation', %(metadata)s, %(properties)s);

-- name: close_conversations
-- The contact's open conversations, closed; false for one that somebody else has closed at this moment.
SELECT c.id, close_conversation(c.id, 'automation', %(note)s, 'automation', %(metadata)s, %(properties)s)
  FROM conversations c
 WHERE c.organization_id = %(organization_id)s
   AND c.contact_id = %(contact_id)s
   AND c.status = 'open'
 ORDER BY c.id;

-- name: record_contact_event
SELECT record_contact_event(
    contact_id        => %(contact_id)s,
    event_type        => %(event_type)s,
    metric_name       => %(metric)s,
    source            => 'automation',
    source_type       => 'INTERNAL',
    external_event_id => %(fact)s,
    entity_type       => %(entity_type)s,
    entity_id         => %(entity_id)s,
    object_id         => %(object_id)s,
    object_id_ref     => %(object_id_ref)s,
    occurred_at       => %(occurred_at)s,
    properties        => %(properties)s,
    metadata          => %(metadata)s);

-- name: due_schedules
-- Schedules that are due, over all organizations. One that another process has in hand is left to it.
SELECT a.organization_id, a.id, a.next_due_at, v.definition, o.timezone
  FROM automations a
  JOIN automation_versions v ON v.organization_id = a.organization_id AND v.automation_id = a.id AND v.version = a.version
  JOIN organizations o ON o.id = a.organization_id
 WHERE a.status = 'enabled'
   AND a.next_due_at <= %(now)s
 ORDER BY a.next_due_at, a.id
 LIMIT %(limit)s
   FOR UPDATE OF a SKIP LOCKED;

-- name: set_next_due
UPDATE automations
   SET next_due_at = %(next_due_at)s
 WHERE organization_id = %(organization_id)s
   AND id = %(automation_id)s;

-- name: audience
-- A page of the contacts that a schedule may be for, with what conditions ask of them.
SELECT c.id, c.name, c.phone_e164, c.email, c.source, c.subscriber_state, c.created_at, c.anonymized_at,
       ARRAY(SELECT t.name
               FROM contact_tag_links l
               JOIN tags t ON t.organization_id = l.organization_id AND t.id = l.tag_id
              WHERE l.organization_id = c.organization_id AND l.contact_id = c.id
              ORDER BY t.name) AS tags,
       true AS is_reachable
  FROM contacts c
 WHERE c.organization_id = %(organization_id)s
   AND c.id > %(after)s
   AND c.merged_into IS NULL
   AND c.anonymized_at IS NULL
   AND (%(tag)s::text IS NULL OR EXISTS (
       SELECT FROM contact_tag_links l
         JOIN tags t ON t.organization_id = l.organization_id AND t.id = l.tag_id
        WHERE l.organization_id = c.organization_id AND l.contact_id = c.id AND t.name = %(tag)s))
 ORDER BY c.id
 LIMIT %(limit)s;

-- name: call
-- A call outside that is to be made, or made again after it was given up.
SELECT r.state, r.position, r.contact_id, a.name, a.status, v.definition, s.state AS step_state, s.details
  FROM automation_runs r
  JOIN automations a ON a.organization_id = r.organization_id AND a.id = r.automation_id
  JOIN automation_versions v
    ON v.organization_id = r.organization_id AND v.automation_id = r.automation_id AND v.version = r.version
  JOIN automation_step_runs s ON s.organization_id = r.organization_id AND s.run_id = r.id AND s.step = %(step)s
 WHERE r.organization_id = %(organization_id)s
   AND r.id = %(run_id)s;

-- name: secrets
SELECT name, sealed
  FROM automation_secrets
 WHERE organization_id = %(organization_id)s
   AND automation_id = %(automation_id)s
   AND name = ANY (%(names)s);

-- name: end_call
-- The last word about a call. No row when the run has been ended meanwhile, or has gone on. What was sent is kept only as
-- long as it may have to be sent again.
WITH run AS (
    UPDATE automation_runs r
       SET state = 'calling',
           reason = NULL,
           finished_at = NULL,
           updated_at = %(now)s
     WHERE r.organization_id = %(organization_id)s
       AND r.id = %(run_id)s
       AND r.position = %(step)s
       AND r.state IN ('calling', 'held', 'failed')
    RETURNING r.id
)
UPDATE automation_step_runs s
   SET state = %(state)s,
       attempt = s.attempt + 1,
       error = %(error)s,
       details = CASE %(state)s WHEN 'done' THEN s.details - 'data' ELSE s.details END || %(details)s,
       finished_at = %(now)s
  FROM run
 WHERE s.organization_id = %(organization_id)s
   AND s.run_id = run.id
   AND s.step = %(step)s
RETURNING s.step;

-- name: call_failed
-- An attempt that failed, with more to come.
UPDATE automation_step_runs
   SET attempt = attempt + 1,
       error = %(error)s
 WHERE organization_id = %(organization_id)s
   AND run_id = %(run_id)s
   AND step = %(step)s
   AND state = 'calling';

-- name: link
-- What a token leads to, over all organizations.
SELECT id, organization_id, url FROM tracked_links WHERE token = %(token)s;

-- name: record_click
SELECT record_link_click(%(link_id)s, %(click_id)s, %(clicked_at)s);

-- name: create
INSERT INTO automations (organization_id, name, description, trigger_type, trigger_metric, trigger_event_type)
VALUES (%(organization_id)s, %(name)s, %(description)s, %(trigger_type)s, %(trigger_metric)s, %(trigger_event_type)s)
RETURNING id;

-- name: add_version
INSERT INTO automation_versions (organization_id, automation_id, version, definition)
VALUES (%(organization_id)s, %(automation_id)s, %(version)s, %(definition)s);

-- name: edit
-- What starts it from now on starts it from now on.
UPDATE automations
   SET name = %(name)s,
       description = %(description)s,
       enabled_at = CASE WHEN (trigger_metric, trigger_event_type)
                              IS DISTINCT FROM (%(trigger_metric)s::text, %(trigger_event_type)s::text)
                         THEN afluente.event_clock() ELSE enabled_at END,
       trigger_type = %(trigger_type)s,
       trigger_metric = %(trigger_metric)s,
       trigger_event_type = %(trigger_event_type)s,
       version = version + 1,
       next_due_at = NULL,
       updated_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND id = %(automation_id)s
RETURNING version;

-- name: set_status
UPDATE automations
   SET status = %(status)s,
       next_due_at = %(next_due_at)s,
       enabled_at = CASE WHEN %(status)s = 'enabled' AND status <> 'enabled'
                         THEN afluente.event_clock() ELSE enabled_at END,
       updated_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND id = %(automation_id)s;

-- name: release_held
-- What was held while the automation was paused goes on: each run gets the event that it waits for.
SELECT emit_event_for(
           r.organization_id, 'system.automation_due', 'automation_run', r.id,
           jsonb_strip_nulls(jsonb_build_object(
               'automation_id', r.automation_id,
               'run_id', r.id,
               'step', r.position,
               'contact_id', r.contact_id,
               'due_at', %(due_at)s::text)),
           jsonb_build_object('source', 'automation', 'causation_id', r.trigger_event_id,
                              'causation_depth', r.causation_depth + 1, 'automation_run', r.id))
  FROM automation_runs r
 WHERE r.organization_id = %(organization_id)s
   AND r.automation_id = %(automation_id)s
   AND r.state = 'held';

-- name: cancel_open
-- Ends the runs that wait, and takes back the events that would wake them.
WITH ended AS (
    UPDATE automation_runs r
       SET state = 'cancelled',
           reason = %(reason)s,
           wake_at = NULL,
           context = '{}',
           updated_at = %(now)s,
           finished_at = %(now)s
     WHERE r.organization_id = %(organization_id)s
       AND r.automation_id = %(automation_id)s
       AND r.finished_at IS NULL
    RETURNING r.id, r.wake_event_id
), steps AS (
    UPDATE automation_step_runs s
       SET state = 'cancelled',
           reason = %(reason)s,
           finished_at = %(now)s
      FROM ended
     WHERE s.organization_id = %(organization_id)s
       AND s.run_id = ended.id
       AND s.state IN ('waiting', 'calling')
)
SELECT id, CASE WHEN wake_event_id IS NOT NULL THEN cancel_deferred_for(%(organization_id)s, wake_event_id) END FROM ended;

-- name: put_secret
INSERT INTO automation_secrets (organization_id, automation_id, name, sealed)
VALUES (%(organization_id)s, %(automation_id)s, %(name)s, %(sealed)s)
ON CONFLICT (organization_id, automation_id, name) DO UPDATE
    SET sealed = excluded.sealed,
        created_at = clock_timestamp();

-- name: secret_names
SELECT name FROM automation_secrets WHERE organization_id = %(organization_id)s AND automation_id = %(automation_id)s;

-- name: find
-- An automation by its id, or by its name within an organization.
SELECT a.id, a.organization_id, a.name, a.description, a.status, a.version, a.trigger_type, a.trigger_metric,
       a.trigger_event_type, a.next_due_at, a.created_at, a.updated_at, v.definition, o.timezone,
       (SELECT count(*) FROM automation_runs r
         WHERE r.organization_id = a.organization_id AND r.automation_id = a.id AND r.finished_at IS NULL) AS open_runs
  FROM automations a
  JOIN automation_versions v ON v.organization_id = a.organization_id AND v.automation_id = a.id AND v.version = a.version
  JOIN organizations o ON o.id = a.organization_id
 WHERE (%(organization_id)s::uuid IS NULL OR a.organization_id = %(organization_id)s)
   AND (a.id = %(id)s OR a.name = %(word)s)
   FOR UPDATE OF a;

-- name: list
-- Every automation, with how many of its runs are open, and how many of the last 30 days went wrong.
SELECT a.id, a.organization_id, a.name, a.status, a.version, a.trigger_type, a.trigger_metric, a.trigger_event_type,
       a.next_due_at,
       (SELECT count(*) FROM automation_runs r
         WHERE r.organization_id = a.organization_id AND r.automation_id = a.id AND r.finished_at IS NULL) AS open_runs,
       (SELECT count(*) FROM automation_runs r
         WHERE r.organization_id = a.organization_id AND r.automation_id = a.id AND r.state IN ('failed', 'stopped')
           AND r.started_at > clock_timestamp() - interval '30 days') AS bad_runs,
       (SELECT max(r.started_at) FROM automation_runs r
         WHERE r.organization_id = a.organization_id AND r.automation_id = a.id) AS last_run_at
  FROM automations a
 WHERE %(organization_id)s::uuid IS NULL OR a.organization_id = %(organization_id)s
 ORDER BY a.organization_id, a.name;

-- name: runs
-- Runs, the newest first.
SELECT r.id, r.automation_id, a.name AS automation, r.version, r.state, r.reason, r.contact_id, r.position, r.wake_at,
       r.trigger_event_id, r.trigger_event_type, r.started_at, r.finished_at
  FROM automation_runs r
  JOIN automations a ON a.organization_id = r.organization_id AND a.id = r.automation_id
 WHERE (%(automation_id)s::uuid IS NULL OR r.automation_id = %(automation_id)s)
   AND (%(organization_id)s::uuid IS NULL OR r.organization_id = %(organization_id)s)
   AND (%(state)s::text IS NULL OR r.state = %(state)s)
   AND (%(contact_id)s::uuid IS NULL OR r.contact_id = %(contact_id)s)
   AND (%(run_id)s::uuid IS NULL OR r.id = %(run_id)s)
 ORDER BY r.started_at DESC, r.id DESC
 LIMIT %(limit)s;

-- name: steps
SELECT run_id, step, type, state, reason, attempt, wake_at, error, outcome, outcome_at, details, started_at, finished_at
  FROM automation_step_runs
 WHERE run_id = ANY (%(run_ids)s)
 ORDER BY run_id, step;

-- name: event
SELECT id, organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at
  FROM event_log
 WHERE id = %(event_id)s;

-- name: event_of_fact
-- What was emitted when a contact event was recorded, made again from its row.
SELECT e.id, e.organization_id, 'contact_event.recorded' AS event_type, 'contact' AS entity_kind,
       e.contact_id AS entity_id,
       jsonb_build_object(
           'contact_event_id', e.id, 'contact_id', e.contact_id, 'contact_event_type', e.event_type,
           'metric_name', e.metric_name, 'category', m.category, 'source_type', e.source_type, 'source', e.source,
           'external_event_id', e.external_event_id, 'unique_event_id', e.unique_event_id, 'object_id', e.object_id,
           'object_id_ref', e.object_id_ref, 'entity_type', e.entity_type, 'entity_id', e.entity_id,
           'value', e.value::text, 'currency', e.currency, 'occurred_at', e.occurred_at, 'received_at', e.received_at,
           'properties', e.properties) AS payload,
       '{}'::jsonb AS metadata, e.created_at
  FROM contact_events e
  LEFT JOIN metrics m
    ON m.organization_id = e.organization_id
   AND m.id = e.metric_id
 WHERE e.id = %(event_id)s;

-- name: state
SELECT state, reason FROM automation_runs WHERE id = %(run_id)s;

-- name: emitted_here
-- What a run has emitted in this transaction.
SELECT event_type, payload ->> 'metric_name'
  FROM event_log
 WHERE tx_id = pg_current_xact_id()
   AND metadata ->> 'automation_run' = %(run_id)s
 ORDER BY seq;
