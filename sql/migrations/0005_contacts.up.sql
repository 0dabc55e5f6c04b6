-- The people and the channels they come through: who a webhook belongs to, who wrote, who bought, and the deliveries
-- of the senders as they came.
--
-- Every foreign key between tenant tables carries organization_id, so no row can point into another organization,
-- whoever writes it.

-- A connection of one organization to one sender: a shop, a payment account, a WhatsApp number.
-- The id stands in the address that the sender posts to; it is random (not uuidv7), because some senders sign nothing
-- and their address is all they have.
CREATE TABLE channels (
    id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    organization_id uuid NOT NULL REFERENCES organizations (id),
    kind            text NOT NULL CHECK (kind IN ('ecommerce', 'payment', 'whatsapp', 'form', 'generic')),
    source          text NOT NULL CHECK (source ~ '^[a-z][a-z0-9_]{0,99}$'),
    -- The sender's own name for the connection: shop domain, store id, account id, phone_number_id.
    external_id     text CHECK (length(external_id) BETWEEN 1 AND 255),
    name            text CHECK (length(name) <= 255),
    status          text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'paused', 'uninstalled')),
    -- A test connection takes the sender's test deliveries; a live one keeps them without counting them.
    mode            text NOT NULL DEFAULT 'live' CHECK (mode IN ('live', 'test')),
    settings        jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(settings) = 'object'),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, source, external_id)
);
-- Serves: the receiver's look-up of the number that one part of a WhatsApp delivery names, over all organizations.
CREATE INDEX channels_external_idx ON channels (source, external_id);
-- A number belongs to one organization: its deliveries are told apart by nothing else.
CREATE UNIQUE INDEX channels_whatsapp_number_idx ON channels (external_id) WHERE source = 'whatsapp';

-- Secrets of a channel, sealed (never plain text). Two slots for each purpose: while a secret rotates the old and the
-- new one are both valid, and there is no third place to forget one in.
CREATE TABLE channel_secrets (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    channel_id      uuid NOT NULL,
    purpose         text NOT NULL CHECK (purpose IN ('signature', 'verify_token', 'api_token')),
    slot            smallint NOT NULL DEFAULT 1 CHECK (slot IN (1, 2)),
    sealed          text NOT NULL,
    valid_until     timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (channel_id, purpose, slot),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id) ON DELETE CASCADE
);

-- A person. The columns hold what is known now; contact_identities says how the person is recognised.
CREATE TABLE contacts (
    id                  uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id     uuid NOT NULL REFERENCES organizations (id),
    name                text CHECK (length(name) <= 255),
    phone_e164          text CHECK (phone_e164 ~ '^\+[1-9][0-9]{6,14}$'),
    email               text CHECK (length(email) <= 320),
    source              text NOT NULL CHECK (length(source) BETWEEN 1 AND 100),
    subscriber_state    text NOT NULL DEFAULT 'unknown'
                        CHECK (subscriber_state IN ('unknown', 'subscribed', 'unsubscribed', 'blocked')),
    subscriber_state_at timestamptz,
    merged_into         uuid,
    anonymized_at       timestamptz,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    FOREIGN KEY (organization_id, merged_into) REFERENCES contacts (organization_id, id),
    CHECK (merged_into IS DISTINCT FROM id)
);

-- What names a person, in the one form used for matching: a phone in E.164 with the ninth digit, an e-mail in lower
-- case, an id of a sender. Phones and e-mails are the same whoever sent them, so their source is ''.
-- as_received keeps the form that the sender used: WhatsApp names many accounts without the ninth digit, and answers
-- must go to the number it knows.
CREATE TABLE contact_identities (
    organization_id uuid NOT NULL,
    kind            text NOT NULL CHECK (kind IN ('phone', 'email', 'external')),
    source          text NOT NULL DEFAULT '' CHECK (length(source) <= 100),
    value           text NOT NULL CHECK (length(value) BETWEEN 1 AND 320),
    contact_id      uuid NOT NULL,
    as_received     text CHECK (length(as_received) <= 320),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, kind, source, value),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id) ON DELETE CASCADE,
    CHECK ((kind = 'external') = (source <> ''))
);
-- Serves: all identities of one contact (the page, erasure).
CREATE INDEX contact_identities_contact_idx ON contact_identities (organization_id, contact_id);

CREATE TABLE tags (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id),
    name            text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    color           text CHECK (color ~ '^#[0-9a-f]{6}$'),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, name)
);

CREATE TABLE contact_tag_links (
    organization_id uuid NOT NULL,
    contact_id      uuid NOT NULL,
    tag_id          uuid NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, contact_id, tag_id),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id) ON DELETE CASCADE,
    FOREIGN KEY (organization_id, tag_id) REFERENCES tags (organization_id, id) ON DELETE CASCADE
);
-- Serves: all contacts of one tag (segments).
CREATE INDEX contact_tag_links_tag_idx ON contact_tag_links (organization_id, tag_id, contact_id);

-- Deliveries of the senders. The POST as it came is a parent row; each organization that part of it belongs to gets a
-- child row with an event webhook.received of its own. The parent's organization is null when several organizations
-- share it or none is known.
-- A child whose part is the whole body leaves raw_body null and reads its parent's: the bytes are kept once.
CREATE TABLE webhook_events (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    parent_id       uuid REFERENCES webhook_events (id),
    organization_id uuid REFERENCES organizations (id),
    channel_id      uuid,
    source          text NOT NULL CHECK (length(source) BETWEEN 1 AND 100),
    topic           text CHECK (length(topic) BETWEEN 1 AND 255),
    verification    text NOT NULL CHECK (verification IN ('verified', 'failed', 'none')),
    -- Why a delivery was refused, kept without processing, or failed: one short word, never data.
    reason          text CHECK (length(reason) <= 255),
    dedupe_key      text CHECK (length(dedupe_key) BETWEEN 1 AND 255),
    status          text NOT NULL
                    CHECK (status IN ('received', 'routed', 'unrouted', 'duplicate', 'refused', 'processed', 'ignored',
                                      'unrecognised', 'failed')),
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    -- What is fetched from the sender's API for a thin webhook ('order:1001'), and when that was last done.
    subject         text CHECK (length(subject) <= 255),
    fetched_at      timestamptz,
    summary         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(summary) = 'object'),
    headers         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    raw_body        bytea,
    body_sha256     bytea CHECK (length(body_sha256) = 32),
    body_bytes      bigint NOT NULL DEFAULT 0 CHECK (body_bytes >= 0),
    received_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    processed_at    timestamptz,
    UNIQUE (organization_id, id),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id),
    CHECK (parent_id IS NULL OR (organization_id IS NOT NULL AND channel_id IS NOT NULL AND dedupe_key IS NOT NULL)),
    CHECK (parent_id IS NULL OR status NOT IN ('routed', 'unrouted', 'duplicate', 'refused')),
    -- What failed its signature is not data: only its hash is kept.
    CHECK (verification <> 'failed' OR raw_body IS NULL)
);
-- The same delivery twice is one child, whoever processes it and when.
CREATE UNIQUE INDEX webhook_events_dedupe_idx ON webhook_events (organization_id, channel_id, dedupe_key)
    WHERE parent_id IS NOT NULL;
-- Serves: the children of one delivery.
CREATE INDEX webhook_events_parent_idx ON webhook_events (parent_id) WHERE parent_id IS NOT NULL;
-- Serves: `afluente webhook list`, newest first; refused and unrouted ones by status.
CREATE INDEX webhook_events_status_idx ON webhook_events (status, received_at DESC);
CREATE INDEX webhook_events_organization_idx ON webhook_events (organization_id, received_at DESC);
-- Serves: has this resource been fetched since that webhook came?
CREATE INDEX webhook_events_subject_idx ON webhook_events (organization_id, channel_id, subject, fetched_at)
    WHERE fetched_at IS NOT NULL;

SELECT tenancy.protect('channels');
SELECT tenancy.protect('channel_secrets');
SELECT tenancy.protect('contacts');
SELECT tenancy.protect('contact_identities');
SELECT tenancy.protect('tags');
SELECT tenancy.protect('contact_tag_links');
SELECT tenancy.protect('webhook_events');

-- The operator sees deliveries that belong to no single organization; their children stay with their tenants.
CREATE POLICY webhook_events_operator ON webhook_events
    FOR SELECT TO afluente_admin USING (parent_id IS NULL AND organization_id IS NULL);

GRANT SELECT, INSERT, UPDATE, DELETE ON channels, contacts, contact_identities, tags, contact_tag_links
    TO afluente_app, afluente_admin, afluente_worker;
-- Applications write and replace secrets; only the receiver's role reads them.
GRANT INSERT, DELETE ON channel_secrets TO afluente_app, afluente_admin;
GRANT SELECT (id, organization_id, channel_id, purpose, slot, valid_until, created_at),
            UPDATE (valid_until)
    ON channel_secrets TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON channel_secrets TO afluente_worker;
GRANT SELECT ON webhook_events TO afluente_app, afluente_admin;
-- The handler of one delivery writes down what became of it, nothing else.
GRANT UPDATE (status, reason, attempts, summary, subject, fetched_at, processed_at) ON webhook_events TO afluente_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_events TO afluente_worker;
