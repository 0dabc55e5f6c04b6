DROP TABLE contact_event_import_batch, contact_event_import;
DROP FUNCTION record_contact_events(json, boolean, uuid, jsonb);
DROP FUNCTION afluente.record_contact_event_items(afluente.contact_event_item[], boolean, jsonb, boolean);
DROP TYPE afluente.contact_event_item;
DROP FUNCTION merge_contacts(uuid, uuid, text, text, text, jsonb);
DROP FUNCTION create_contact(text, jsonb, text, jsonb);
DROP FUNCTION update_contact(uuid, jsonb, text, jsonb);
DROP FUNCTION add_tag(uuid, text, text, jsonb, jsonb);
DROP FUNCTION remove_tag(uuid, text, text, jsonb, jsonb);
DROP FUNCTION open_conversation(uuid, uuid, text, jsonb, text, jsonb, jsonb, text, timestamptz, timestamptz, uuid, uuid);
DROP FUNCTION assign_conversation(uuid, uuid, text, text, jsonb);
DROP FUNCTION close_conversation(uuid, text, text, text, jsonb, jsonb);
DROP TRIGGER follow_merge ON link_clicks;
DROP TRIGGER follow_merge ON tracked_links;
DROP TRIGGER follow_merge ON automation_runs;
DROP TRIGGER follow_merge ON orders;
DROP TRIGGER follow_merge ON leads;
DROP TRIGGER follow_merge ON messages;
DROP TRIGGER follow_merge ON conversations;
DROP TRIGGER follow_merge ON contact_tag_links;
DROP TRIGGER follow_merge ON contact_identities;
DROP FUNCTION afluente.follow_merge();
CREATE OR REPLACE VIEW contact_metrics_summary_v WITH (security_invoker = true) AS
SELECT
    md5(s.organization_id::text || s.contact_id::text || s.metric_name)::uuid AS id,
    s.organization_id,
    s.contact_id,
    s.metric_name,
    s.event_count,
    t.total_value,
    t.currency,
    coalesce(t.totals, '{}'::jsonb) AS totals,
    s.first_event_at,
    s.last_event_at,
    s.updated_at
FROM stream_generation AS g
JOIN contact_metrics_summary AS s ON s.generation = g.generation
LEFT JOIN LATERAL (
    SELECT
        CASE WHEN count(*) = 1 THEN min(c.total_value) END AS total_value,
        CASE WHEN count(*) = 1 THEN min(c.currency) END AS currency,
        jsonb_object_agg(c.currency, c.total_value) AS totals
    FROM contact_metrics_summary_currency AS c
    WHERE c.generation = s.generation
        AND c.organization_id = s.organization_id
        AND c.contact_id = s.contact_id
        AND c.metric_name = s.metric_name
) AS t ON true
WHERE g.state = 'live';

DROP INDEX contact_events_type_period_idx;
DROP INDEX contact_events_metric_period_idx;
DROP INDEX contact_events_period_idx;
DROP INDEX contacts_merged_idx;
