-- A shop says when a checkout begins and changes; that it was left is ours to notice. One row for each checkout until it
-- is an order, or is found left. Nobody's name is in it: whose it is, is known by the fact that it began.
CREATE TABLE checkouts (
    organization_id   uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    source            text NOT NULL CHECK (char_length(source) BETWEEN 1 AND 100),
    token             text NOT NULL CHECK (char_length(token) BETWEEN 1 AND 255),
    channel_id        uuid NOT NULL,
    cart_token        text CHECK (char_length(cart_token) <= 255),
    -- The delivery it was last seen in; gone with it.
    webhook_event_id  uuid,
    value             numeric CHECK (value NOT IN ('NaN', 'Infinity', '-Infinity')),
    currency          text CHECK (currency ~ '^[A-Z]{3}$'),
    product_ids       text[] NOT NULL DEFAULT '{}',
    stage             text CHECK (char_length(stage) <= 50),
    source_updated_at timestamptz,   -- null: an order came first, and names it
    due_at            timestamptz,   -- webhook.checkout_due is on its way for then
    abandoned_at      timestamptz,
    completed_at      timestamptz,   -- it became an order
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, source, token),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id) ON DELETE CASCADE,
    FOREIGN KEY (organization_id, webhook_event_id) REFERENCES webhook_events (organization_id, id)
        ON DELETE SET NULL (webhook_event_id)
);
-- Serves: an order names the cart; checkouts of one cart are one purchase.
CREATE INDEX checkouts_cart ON checkouts (organization_id, source, cart_token) WHERE cart_token IS NOT NULL;
-- Keeps the foreign key's check cheap.
CREATE INDEX checkouts_webhook_event ON checkouts (organization_id, webhook_event_id) WHERE webhook_event_id IS NOT NULL;

SELECT tenancy.protect('checkouts');
GRANT SELECT, INSERT, UPDATE, DELETE ON checkouts TO afluente_app, afluente_admin, afluente_worker;
