-- name: targets
-- Who is told about an event of this type. The caller has kept the webhook family out.
SELECT s.id
  FROM webhook_subscriptions s
 WHERE s.organization_id = %(organization_id)s
   AND s.enabled
   AND s.event_types && ARRAY['*', %(event_type)s]
 ORDER BY s.id;

-- name: prepare
-- What one attempt needs: the target as it is now, the secrets that sign now (the one in use first), when the delivery was
-- built, and how often it was tried. By afluente_worker, the only role that reads secrets: hence the organization in each part.
SELECT s.url, s.enabled, s.disabled_reason, d.created_at,
       (SELECT count(*)
          FROM webhook_delivery_attempts a
         WHERE a.organization_id = s.organization_id
           AND a.delivery_id = %(delivery_id)s),
       ARRAY(SELECT k.sealed
               FROM webhook_subscription_secrets k
              WHERE k.organization_id = s.organization_id
                AND k.subscription_id = s.id
                AND (k.valid_until IS NULL OR k.valid_until > %(now)s)
              ORDER BY k.valid_until NULLS FIRST)
  FROM webhook_subscriptions s
  LEFT JOIN event_delivery d
    ON d.event_created_at = %(event_created_at)s
   AND d.worker = %(worker)s
   AND d.event_id = %(event_id)s
   AND d.target = %(target)s
   AND d.organization_id = s.organization_id
 WHERE s.organization_id = %(organization_id)s
   AND s.id = %(subscription_id)s;

-- name: log_attempt
-- One call that was made, or refused.
INSERT INTO webhook_delivery_attempts
    (organization_id, subscription_id, delivery_id, event_id, event_type, attempt, started_at, duration_ms,
     status_code, error, snippet)
VALUES
    (%(organization_id)s, %(subscription_id)s, %(delivery_id)s, %(event_id)s, %(event_type)s, %(attempt)s, %(started_at)s,
     %(duration_ms)s, %(status_code)s, %(error)s, %(snippet)s);

-- name: succeeded
-- A success ends the row of failures, unless it began before the latest of them did: then it says nothing about the
-- receiver since. Touches nothing when there is nothing to end, so that a healthy subscription's row is not contended.
UPDATE webhook_subscriptions s
   SET consecutive_failures = 0,
       updated_at = clock_timestamp()
 WHERE s.organization_id = %(organization_id)s
   AND s.id = %(subscription_id)s
   AND s.consecutive_failures > 0
   AND s.last_failure_at <= %(started_at)s;

-- name: failed
-- One more failure, and the end of the subscription if it is one too many: in one statement, so that of several workers
-- that cross the limit together exactly one is told that it did. No row: it was disabled already.
UPDATE webhook_subscriptions s
   SET consecutive_failures = CASE WHEN s.consecutive_failures + 1 >= %(limit)s THEN 0 ELSE s.consecutive_failures + 1 END,
       enabled = s.consecutive_failures + 1 < %(limit)s,
       disabled_at = CASE WHEN s.consecutive_failures + 1 >= %(limit)s THEN clock_timestamp() END,
       disabled_reason = CASE WHEN s.consecutive_failures + 1 >= %(limit)s THEN %(reason)s END,
       last_error = %(error)s,
       last_failure_at = GREATEST(s.last_failure_at, %(started_at)s),
       updated_at = clock_timestamp()
 WHERE s.organization_id = %(organization_id)s
   AND s.id = %(subscription_id)s
   AND s.enabled
RETURNING s.enabled;

-- name: create
-- A subscription, enabled.
INSERT INTO webhook_subscriptions (organization_id, url, event_types, description)
VALUES (%(organization_id)s, %(url)s, %(event_types)s, %(description)s)
RETURNING id;

-- name: add_secret
-- The secret in use from now on. The one before it was given an end first.
INSERT INTO webhook_subscription_secrets (organization_id, subscription_id, sealed)
VALUES (%(organization_id)s, %(subscription_id)s, %(sealed)s);

-- name: drop_ending_secrets
-- At most two secrets sign: the one that was ending gives way to the one that begins to end.
DELETE FROM webhook_subscription_secrets k
 WHERE k.organization_id = %(organization_id)s
   AND k.subscription_id = %(subscription_id)s
   AND k.valid_until IS NOT NULL;

-- name: end_secret
-- The secret in use signs until then, beside the one that follows it.
UPDATE webhook_subscription_secrets k
   SET valid_until = %(valid_until)s
 WHERE k.organization_id = %(organization_id)s
   AND k.subscription_id = %(subscription_id)s
   AND k.valid_until IS NULL;

-- name: enable
-- Enabled, with a clean count.
UPDATE webhook_subscriptions s
   SET enabled = true,
       disabled_at = NULL,
       disabled_reason = NULL,
       consecutive_failures = 0,
       updated_at = clock_timestamp()
 WHERE s.organization_id = %(organization_id)s
   AND s.id = %(subscription_id)s;

-- name: find
-- One subscription, locked, by its id alone: for a command line that was given nothing else.
SELECT s.organization_id, s.disabled_at
  FROM webhook_subscriptions s
 WHERE s.id = %(subscription_id)s
   FOR UPDATE;

-- name: list
-- Subscriptions with what became of their latest deliveries.
SELECT s.id, s.organization_id, s.url, s.event_types, s.description, s.enabled, s.disabled_reason, s.disabled_at,
       s.consecutive_failures, s.last_error, s.created_at,
       (SELECT max(a.started_at)
          FROM webhook_delivery_attempts a
         WHERE a.organization_id = s.organization_id
           AND a.subscription_id = s.id
           AND a.error IS NULL) AS last_success_at
  FROM webhook_subscriptions s
 WHERE %(organization_id)s::uuid IS NULL
    OR s.organization_id = %(organization_id)s
 ORDER BY s.organization_id, s.created_at, s.id;
