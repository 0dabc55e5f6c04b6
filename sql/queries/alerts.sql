-- name: alert
-- One open alert for each cause.
INSERT INTO alerts (organization_id, kind, severity, audience, title, details, dedupe_key, event_id)
VALUES (%(organization_id)s, %(kind)s, 'warning', %(audience)s, %(title)s, %(details)s, %(dedupe_key)s, %(event_id)s)
ON CONFLICT (organization_id, dedupe_key) WHERE status <> 'resolved' DO UPDATE
    SET occurrences = alerts.occurrences + 1,
        last_seen_at = clock_timestamp();
