-- Who is told about events by HTTP, the secrets that sign for them, and the log of every attempt.

CREATE TABLE webhook_subscriptions (
    id                   uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id      uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    url                  text NOT NULL CHECK (char_length(url) BETWEEN 8 AND 2048 AND url ~ '^https?://'),
    description          text NOT NULL DEFAULT '' CHECK (char_length(description) <= 255),
    event_types          text[] NOT NULL,
    enabled              boolean NOT NULL DEFAULT true,
    disabled_reason      text CHECK (char_length(disabled_reason) <= 255),
    disabled_at          timestamptz,
    consecutive_failures integer NOT NULL DEFAULT 0 CHECK (consecutive_failures >= 0),
    last_error           text CHECK (char_length(last_error) <= 1000),
    -- When the latest failed attempt had begun: a success that began before it does not hide it.
    last_failure_at      timestamptz,
    created_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    CHECK (enabled = (disabled_at IS NULL) AND enabled = (disabled_reason IS NULL)),
    CHECK (cardinality(event_types) BETWEEN 1 AND 200),
    -- '*' is every type but those of the webhook family: a subscription to its own failures would feed itself for ever.
    CONSTRAINT webhook_subscriptions_event_types CHECK (
        array_position(event_types, NULL) IS NULL
        AND array_to_string(event_types, ' ') ~ '^(\*|[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)( (\*|[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*))*$'
        AND array_to_string(event_types, ' ') !~ '(^| )webhook\.')
);
COMMENT ON TABLE webhook_subscriptions IS 'Targets of webhook-dispatch-worker; a delivery''s target is the id.';
CREATE INDEX webhook_subscriptions_enabled ON webhook_subscriptions (organization_id) WHERE enabled;  -- the targets of an event
SELECT tenancy.protect('webhook_subscriptions');
GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_subscriptions TO afluente_app, afluente_admin, afluente_worker;

-- The secret in use has no end; the one before it, while the subscriber changes over, has. Sealed for one subscription.
CREATE TABLE webhook_subscription_secrets (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    sealed          text NOT NULL,
    valid_until     timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (organization_id, subscription_id) REFERENCES webhook_subscriptions (organization_id, id) ON DELETE CASCADE
);
CREATE UNIQUE INDEX webhook_subscription_secrets_in_use
    ON webhook_subscription_secrets (organization_id, subscription_id) WHERE valid_until IS NULL;
CREATE UNIQUE INDEX webhook_subscription_secrets_ending
    ON webhook_subscription_secrets (organization_id, subscription_id) WHERE valid_until IS NOT NULL;
SELECT tenancy.protect('webhook_subscription_secrets');
-- Applications write and replace secrets; only the dispatcher's role reads them.
GRANT INSERT, DELETE ON webhook_subscription_secrets TO afluente_app, afluente_admin;
GRANT SELECT (id, organization_id, subscription_id, valid_until, created_at), UPDATE (valid_until)
   ON webhook_subscription_secrets TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_subscription_secrets TO afluente_worker;

-- One row for each call that was made, or refused. Kept by the month: old ones leave as whole partitions. The snippet is
-- what the receiver answered, and empty for a target that was refused.
CREATE TABLE webhook_delivery_attempts (
    id              uuid NOT NULL DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    subscription_id uuid NOT NULL,
    delivery_id     uuid NOT NULL,
    event_id        uuid NOT NULL,
    event_type      text NOT NULL CHECK (char_length(event_type) <= 100),
    attempt         integer NOT NULL CHECK (attempt >= 1),
    started_at      timestamptz NOT NULL,
    duration_ms     integer NOT NULL CHECK (duration_ms >= 0),
    status_code     smallint,
    error           text CHECK (char_length(error) <= 1000),
    snippet         text NOT NULL DEFAULT '' CHECK (char_length(snippet) <= 1000),
    PRIMARY KEY (id, started_at)
) PARTITION BY RANGE (started_at);
COMMENT ON COLUMN webhook_delivery_attempts.attempt IS 'X-Webhook-Attempt: goes on counting when a delivery is reprocessed.';
CREATE INDEX webhook_delivery_attempts_delivery ON webhook_delivery_attempts (organization_id, delivery_id);  -- the next attempt's number
CREATE INDEX webhook_delivery_attempts_subscription
    ON webhook_delivery_attempts (organization_id, subscription_id, started_at DESC);  -- a subscription's delivery log
CREATE INDEX webhook_delivery_attempts_event ON webhook_delivery_attempts (organization_id, event_id);  -- erasure, trace
SELECT tenancy.protect('webhook_delivery_attempts');
GRANT SELECT, INSERT ON webhook_delivery_attempts TO afluente_app;
GRANT SELECT ON webhook_delivery_attempts TO afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_delivery_attempts TO afluente_worker;

INSERT INTO afluente.monthly_partitioned (table_name) VALUES ('webhook_delivery_attempts');
SELECT afluente.ensure_partitions((clock_timestamp() AT TIME ZONE 'UTC' + interval '3 months')::date);
