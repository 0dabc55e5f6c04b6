-- name: channel
-- The connection that an address belongs to, with the secrets that are valid now. Seen by afluente_worker: the sender does
-- not say whose it is. One row for each secret; a channel without any has one row with nulls.
SELECT c.id, c.organization_id, c.source, c.external_id, c.status, c.settings, s.purpose, s.sealed, s.valid_until,
       afluente.channel_version(c.id) AS version
  FROM channels c
  LEFT JOIN channel_secrets s
    ON s.organization_id = c.organization_id
   AND s.channel_id = c.id
   AND (s.valid_until IS NULL OR s.valid_until > %(now)s)
 WHERE c.id = %(channel_id)s
   AND c.source = %(source)s
 ORDER BY s.created_at;

-- name: channels_named
-- The connections that parts of a shared delivery name, by number or by account, over all organizations.
SELECT c.id, c.organization_id, c.source, c.external_id, c.status, c.settings, s.purpose, s.sealed, s.valid_until,
       afluente.channel_version(c.id) AS version
  FROM channels c
  LEFT JOIN channel_secrets s
    ON s.organization_id = c.organization_id
   AND s.channel_id = c.id
   AND (s.valid_until IS NULL OR s.valid_until > %(now)s)
 WHERE c.source = %(source)s
   AND (c.external_id = ANY (%(external_ids)s) OR c.settings ->> 'account_id' = ANY (%(account_ids)s))
 ORDER BY c.id, s.created_at;

-- name: receive
-- Several POSTs at once, each with its parts and their events.
SELECT post_id, events
  FROM afluente.receive_webhooks(%(posts)s::jsonb, %(bodies)b::bytea[], %(parts)s::jsonb, %(channel_ids)s::uuid[],
                                 %(versions)s::text[]);

-- name: insert_parent
-- A POST that was refused.
INSERT INTO webhook_events (organization_id, channel_id, source, topic, verification, reason, status, summary, headers,
                            raw_body, body_sha256, body_bytes, received_at)
VALUES (%(organization_id)s, %(channel_id)s, %(source)s, %(topic)s, %(verification)s, %(reason)s, %(status)s, %(summary)s,
        %(headers)s, %(raw_body)s, %(body_sha256)s, %(body_bytes)s, %(received_at)s)
RETURNING id;

-- name: insert_child
-- One organization's part. No row when the same delivery was stored before; a second one at the same moment waits here.
INSERT INTO webhook_events (parent_id, organization_id, channel_id, source, topic, verification, dedupe_key, status, subject,
                            summary, headers, raw_body, body_sha256, body_bytes, received_at)
VALUES (%(parent_id)s, %(organization_id)s, %(channel_id)s, %(source)s, %(topic)s, 'verified', %(dedupe_key)s, 'received',
        %(subject)s, %(summary)s, %(headers)s, %(raw_body)s, %(body_sha256)s, %(body_bytes)s, %(received_at)s)
ON CONFLICT (organization_id, channel_id, dedupe_key) WHERE parent_id IS NOT NULL DO NOTHING
RETURNING id;

-- name: settle_parent
-- What became of a POST whose missing parts were found.
UPDATE webhook_events
   SET status = %(status)s,
       reason = %(reason)s,
       organization_id = %(organization_id)s
 WHERE id = %(id)s;

-- name: stored
-- One stored delivery, whole.
SELECT id, parent_id, organization_id, channel_id, source, topic, verification, status, reason, headers, raw_body, received_at
  FROM webhook_events
 WHERE id = %(id)s
   FOR UPDATE;

-- name: handled
-- One organization's part with its bytes: its own, or those of the POST when it is the whole of it. A POST that is
-- shared with others is not seen by the organization, hence the outer join.
SELECT c.id, c.channel_id, c.source, c.topic, c.status, c.subject, c.fetched_at, c.headers, c.received_at,
       COALESCE(c.raw_body, p.raw_body) AS raw_body, ch.mode, ch.settings, ch.external_id
  FROM webhook_events c
  LEFT JOIN webhook_events p
    ON p.id = c.parent_id
  JOIN channels ch
    ON ch.organization_id = c.organization_id
   AND ch.id = c.channel_id
 WHERE c.id = %(id)s
   AND c.organization_id = %(organization_id)s;

-- name: outcome
-- What the worker made of a part.
UPDATE webhook_events
   SET status = %(status)s,
       reason = %(reason)s,
       attempts = attempts + 1,
       summary = summary || %(summary)s,
       fetched_at = COALESCE(%(fetched_at)s, fetched_at),
       processed_at = %(processed_at)s
 WHERE id = %(id)s
   AND organization_id = %(organization_id)s;

-- name: failed_attempt
-- The sender could not be asked; whether another try comes is the status.
UPDATE webhook_events
   SET status = %(status)s,
       reason = %(reason)s,
       attempts = attempts + 1
 WHERE id = %(id)s
   AND organization_id = %(organization_id)s;

-- name: fetched_since
-- Whether a resource was fetched after this webhook came, for another webhook of the same resource.
SELECT 1
  FROM webhook_events
 WHERE organization_id = %(organization_id)s
   AND channel_id = %(channel_id)s
   AND subject = %(subject)s
   AND fetched_at > %(received_at)s
   AND status = 'processed'
 LIMIT 1;

-- name: again
-- A part goes through the worker once more.
UPDATE webhook_events
   SET status = 'received',
       reason = NULL,
       processed_at = NULL
 WHERE id = %(id)s;

-- name: list
-- Deliveries for people, newest first. Parents stand for what was refused, repeated or not routed; children for the rest.
-- `sender`: of a generic connection the name in its mapping.
SELECT w.id, w.parent_id, w.organization_id, w.channel_id, w.source, w.topic, w.verification, w.status, w.reason, w.attempts,
       w.received_at, w.processed_at, w.summary,
       CASE WHEN w.source = 'generic' THEN COALESCE(c.external_id, w.source) ELSE w.source END AS sender
  FROM webhook_events w
  LEFT JOIN channels c
    ON c.id = w.channel_id
 WHERE (w.parent_id IS NOT NULL OR w.status IN ('unrouted', 'duplicate', 'refused') OR w.reason LIKE 'unrouted_parts:%%')
   AND (%(status)s::text IS NULL OR w.status = %(status)s)
   AND (%(source)s::text IS NULL OR w.source = %(source)s
        OR w.source = 'generic' AND c.external_id = %(source)s)
   AND (%(channel_id)s::uuid IS NULL OR w.channel_id = %(channel_id)s)
   AND (%(organization_id)s::uuid IS NULL OR w.organization_id = %(organization_id)s)
   AND (%(since)s::timestamptz IS NULL OR w.received_at >= %(since)s)
 ORDER BY w.received_at DESC, w.id DESC
 LIMIT %(limit)s;
