-- The facts about a contact, append-only: the source of truth that the summaries and memories are folded from.
-- The columns are those of both seeds: a fact has a contact event type, a metric, or both, and is one row.

CREATE TABLE metrics (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id),
    name            text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    display_name    text NOT NULL CHECK (length(display_name) BETWEEN 1 AND 255),
    category        text NOT NULL DEFAULT 'custom'
                    CHECK (category IN ('ecommerce', 'messaging', 'tracking', 'engagement', 'contact', 'custom')),
    source          text CHECK (length(source) <= 100),
    is_system       boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, name)
);

CREATE TABLE contact_events (
    id                uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id   uuid NOT NULL,
    contact_id        uuid NOT NULL,
    source_type       text NOT NULL CHECK (source_type IN ('EXTERNAL', 'INTERNAL', 'DIRECT')),
    source            text NOT NULL CHECK (length(source) BETWEEN 1 AND 100),
    event_type        text CHECK (length(event_type) BETWEEN 1 AND 100),
    metric_id         uuid,
    metric_name       text CHECK (length(metric_name) BETWEEN 1 AND 100),
    object_id         text CHECK (length(object_id) <= 255),
    object_id_ref     text CHECK (length(object_id_ref) <= 255),
    entity_type       text CHECK (length(entity_type) BETWEEN 1 AND 100),
    entity_id         text CHECK (length(entity_id) <= 255),
    properties        jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(properties) = 'object'),
    -- The lead seed's word for the same thing; virtual, so it is kept once.
    payload           jsonb GENERATED ALWAYS AS (properties) VIRTUAL,
    -- The sender's own words, where they are not already kept by webhook_event_id.
    raw_payload       jsonb,
    webhook_event_id  uuid,
    value             numeric CHECK (value NOT IN ('NaN', 'Infinity', '-Infinity')),
    currency          text DEFAULT 'BRL' CHECK (currency ~ '^[A-Z]{3}$'),
    -- Both name the fact, not the object: external_event_id is '<fact>:<source id>' (order_paid:1001), unique_event_id
    -- '<source>:<entity_type, or event>:<external_event_id>'. Twins of one fact get the same name and count once.
    external_event_id text CHECK (length(external_event_id) BETWEEN 1 AND 255),
    unique_event_id   text CHECK (length(unique_event_id) BETWEEN 1 AND 500),
    integration_id    uuid,
    occurred_at       timestamptz NOT NULL,
    received_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    schema_version    integer NOT NULL DEFAULT 1 CHECK (schema_version >= 1),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (event_type IS NOT NULL OR metric_name IS NOT NULL),
    CHECK ((metric_id IS NULL) = (metric_name IS NULL)),
    UNIQUE (organization_id, id),
    -- Within an organization: two shops both have order 1001.
    UNIQUE (organization_id, source, external_event_id),
    UNIQUE (organization_id, unique_event_id),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, metric_id) REFERENCES metrics (organization_id, id),
    FOREIGN KEY (organization_id, integration_id) REFERENCES channels (organization_id, id)
        ON DELETE SET NULL (integration_id),
    FOREIGN KEY (organization_id, webhook_event_id) REFERENCES webhook_events (organization_id, id)
        ON DELETE SET NULL (webhook_event_id)
);
-- Serves: the events of one type of one contact in a period ("purchase_completed of X in the last 30 days").
CREATE INDEX contact_events_type_idx ON contact_events (organization_id, contact_id, event_type, occurred_at, id)
    WHERE event_type IS NOT NULL;
-- Serves: the same by metric; counts for the summaries' check.
CREATE INDEX contact_events_metric_idx ON contact_events (organization_id, contact_id, metric_name, occurred_at, id)
    WHERE metric_name IS NOT NULL;
-- Serves: one contact's time line (the page, a rebuild of memories).
CREATE INDEX contact_events_contact_idx ON contact_events (organization_id, contact_id, occurred_at, id);
-- Serves: what came of one delivery; also keeps the foreign key's check cheap.
CREATE INDEX contact_events_webhook_idx ON contact_events (organization_id, webhook_event_id)
    WHERE webhook_event_id IS NOT NULL;

SELECT tenancy.protect('metrics');
SELECT tenancy.protect('contact_events');

GRANT SELECT, INSERT, UPDATE (display_name, category) ON metrics TO afluente_app, afluente_admin, afluente_worker;
-- Append-only: rows come from record_contact_event alone. Erasure (afluente_worker) blanks and deletes.
GRANT SELECT ON contact_events TO afluente_app, afluente_admin;
GRANT SELECT, DELETE, UPDATE (properties, raw_payload, object_id, object_id_ref, entity_id, external_event_id,
                                unique_event_id)
    ON contact_events TO afluente_worker;
