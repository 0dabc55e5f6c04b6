DROP FUNCTION emit_metric_event(uuid, text, jsonb, numeric, text, text, text, uuid, text, text, timestamptz, text, uuid,
    jsonb);
DROP FUNCTION record_contact_event(uuid, text, text, text, text, text, text, text, text, text, text, numeric, text,
    timestamptz, timestamptz, jsonb, jsonb, uuid, uuid, uuid, jsonb);
DROP FUNCTION afluente.contact_event_type_of(text);
DROP FUNCTION afluente.metric_of(text);
DROP FUNCTION afluente.ensure_metric(uuid, text, text);
DROP FUNCTION afluente.metric_category(text);
DROP TABLE contact_events;
DROP TABLE metrics;
