-- name: list
-- An organization's contact events, newest first; a contact's are those of everybody merged into it. The conditions that are
-- not asked for fall away when the statement is planned, so it must not be a prepared one.
SELECT e.id, e.occurred_at, e.event_type, e.metric_name, m.category, e.value, e.currency, e.source, e.source_type,
       e.contact_id, e.external_event_id, e.unique_event_id, e.entity_type, e.entity_id, e.object_id, e.object_id_ref,
       e.properties, e.received_at
  FROM contact_events e
  LEFT JOIN metrics m
    ON m.organization_id = e.organization_id
   AND m.id = e.metric_id
 WHERE e.organization_id = %(organization_id)s
   AND (%(contact_id)s::uuid IS NULL
        OR e.contact_id = ANY (afluente.contact_ids(%(organization_id)s, %(contact_id)s)))
   AND (%(event_type)s::text IS NULL OR e.event_type = %(event_type)s)
   AND (%(metric_name)s::text IS NULL OR e.metric_name = %(metric_name)s)
   AND (%(source)s::text IS NULL OR e.source = %(source)s)
   AND (%(category)s::text IS NULL OR m.category = %(category)s)
   AND (%(since)s::timestamptz IS NULL OR e.occurred_at >= %(since)s)
   AND (%(until)s::timestamptz IS NULL OR e.occurred_at < %(until)s)
   AND (%(before_at)s::timestamptz IS NULL
        OR (e.occurred_at <= %(before_at)s AND (e.occurred_at, e.id) < (%(before_at)s, %(before_id)s::uuid)))
 ORDER BY e.occurred_at DESC, e.id DESC
 LIMIT %(limit)s;

-- name: count
-- How many they are, what they come to in each currency (decimals as text, as values are), when the first and the last happened; by what is asked for.
SELECT g.what,
       sum(g.events)::bigint AS events,
       jsonb_object_agg(g.currency, g.total::text) FILTER (WHERE g.total IS NOT NULL) AS totals,
       min(g.first_at) AS first_at,
       max(g.last_at) AS last_at
  FROM (SELECT CASE %(by)s::text
                   WHEN 'type' THEN e.event_type
                   WHEN 'metric' THEN e.metric_name
                   WHEN 'source' THEN e.source
                   WHEN 'contact' THEN COALESCE(c.merged_into, e.contact_id)::text
                   WHEN 'day' THEN (e.occurred_at AT TIME ZONE o.timezone)::date::text
               END AS what,
               COALESCE(e.currency, 'BRL') AS currency,
               count(*) AS events,
               sum(e.value) AS total,
               min(e.occurred_at) AS first_at,
               max(e.occurred_at) AS last_at
          FROM contact_events e
          JOIN organizations o
            ON o.id = e.organization_id
          LEFT JOIN contacts c
            ON %(by)s::text = 'contact'
           AND c.organization_id = e.organization_id
           AND c.id = e.contact_id
         WHERE e.organization_id = %(organization_id)s
           AND (%(contact_id)s::uuid IS NULL
                OR e.contact_id = ANY (afluente.contact_ids(%(organization_id)s, %(contact_id)s)))
           AND (%(event_type)s::text IS NULL OR e.event_type = %(event_type)s)
           AND (%(metric_name)s::text IS NULL OR e.metric_name = %(metric_name)s)
           AND (%(source)s::text IS NULL OR e.source = %(source)s)
           AND (%(since)s::timestamptz IS NULL OR e.occurred_at >= %(since)s)
           AND (%(until)s::timestamptz IS NULL OR e.occurred_at < %(until)s)
         GROUP BY 1, 2) g
 GROUP BY g.what
 ORDER BY events DESC, g.what
 LIMIT %(limit)s;

-- name: recount
-- What the summaries come to, counted from the facts: for one contact or all of an organization, those merged into another
-- with the one that stayed. Facts keep the contact they were recorded with, so this is right whatever was in flight when
-- contacts were merged.
SELECT COALESCE(c.merged_into, c.id) AS contact_id, e.metric_name, count(*) AS events, min(e.occurred_at) AS first_at,
       max(e.occurred_at) AS last_at
  FROM contact_events e
  JOIN contacts c
    ON c.organization_id = e.organization_id
   AND c.id = e.contact_id
 WHERE e.organization_id = %(organization_id)s
   AND e.metric_name IS NOT NULL
   AND (%(contact_id)s::uuid IS NULL
        OR e.contact_id = ANY (afluente.contact_ids(%(organization_id)s, %(contact_id)s)))
 GROUP BY 1, 2
 ORDER BY 1, 2;
