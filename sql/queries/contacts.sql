-- name: list
-- An organization's contacts, newest first, without those merged into others. `search` is a part of a name, or a whole
-- phone, e-mail or id of a sender.
SELECT c.id, c.name, c.phone_e164 AS phone, c.email, c.subscriber_state, c.source, c.created_at, c.anonymized_at
  FROM contacts c
 WHERE c.organization_id = %(organization_id)s
   AND c.merged_into IS NULL
   AND (%(search)s::text IS NULL
        OR position(lower(%(search)s) IN lower(c.name)) > 0
        OR EXISTS (SELECT FROM contact_identities i
                    WHERE i.organization_id = c.organization_id
                      AND i.contact_id = c.id
                      AND i.value = ANY (%(values)s)))
   AND (%(tag)s::text IS NULL
        OR EXISTS (SELECT FROM contact_tag_links l
                     JOIN tags t ON t.organization_id = l.organization_id AND t.id = l.tag_id
                    WHERE l.organization_id = c.organization_id
                      AND l.contact_id = c.id
                      AND t.name = %(tag)s))
   AND (%(before)s::uuid IS NULL OR c.id < %(before)s)
 ORDER BY c.id DESC
 LIMIT %(limit)s;

-- name: show
-- A contact by any of its ids: what is known of the one that stays.
SELECT c.id, c.name, c.phone_e164 AS phone, c.email, c.subscriber_state, c.subscriber_state_at, c.source, c.created_at,
       c.updated_at, c.anonymized_at, afluente.contact_ids(c.organization_id, c.id) AS ids
  FROM contacts asked
  JOIN contacts c
    ON c.organization_id = asked.organization_id
   AND c.id = COALESCE(asked.merged_into, asked.id)
 WHERE asked.organization_id = %(organization_id)s
   AND asked.id = %(contact_id)s;

-- name: identities
SELECT kind, source, value, as_received
  FROM contact_identities
 WHERE organization_id = %(organization_id)s
   AND contact_id = %(contact_id)s
 ORDER BY kind, source, value;

-- name: tags
SELECT t.name
  FROM contact_tag_links l
  JOIN tags t
    ON t.organization_id = l.organization_id
   AND t.id = l.tag_id
 WHERE l.organization_id = %(organization_id)s
   AND l.contact_id = %(contact_id)s
 ORDER BY t.name;

-- name: metrics
-- The summaries of a person, of all its ids together: what the stream application has folded up to now. Currencies are never
-- added up; totals are decimals as text.
SELECT s.metric_name, s.event_count AS events, s.first_event_at AS first_at, s.last_event_at AS last_at,
       COALESCE((SELECT jsonb_object_agg(t.key, t.value) FROM jsonb_each_text(s.totals) t), '{}') AS totals
  FROM contact_metrics_summary_v s
 WHERE s.organization_id = %(organization_id)s
   AND s.contact_id = %(contact_id)s
 ORDER BY s.metric_name;

-- name: merge
SELECT contact_id, merged, merged_fields, moved
  FROM merge_contacts(%(from_contact_id)s, %(into_contact_id)s, %(actor_id)s, %(reason)s, 'system');
