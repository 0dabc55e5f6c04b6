-- The tenants, who may act for them, and what was done and noticed in them.

CREATE TABLE organizations (
    id          uuid PRIMARY KEY DEFAULT uuidv7(),
    name        text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
    slug        text UNIQUE CHECK (slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    timezone    text NOT NULL DEFAULT 'America/Sao_Paulo',
    locale      text NOT NULL DEFAULT 'pt-BR' CHECK (locale IN ('pt-BR', 'en', 'es')),
    currency    text NOT NULL DEFAULT 'BRL' CHECK (currency ~ '^[A-Z]{3}$'),
    settings    jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(settings) = 'object'),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE organizations IS 'The tenants. Their id is organization_id everywhere else.';
SELECT tenancy.protect('organizations', 'id');
GRANT SELECT ON organizations TO afluente_app;
GRANT UPDATE (name, timezone, locale, currency, settings, updated_at) ON organizations TO afluente_app;
GRANT SELECT, UPDATE ON organizations TO afluente_admin;
GRANT SELECT, INSERT, UPDATE ON organizations TO afluente_worker;

CREATE TABLE members (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    user_id         uuid NOT NULL,
    email           text NOT NULL CHECK (char_length(email) BETWEEN 3 AND 255),
    name            text CHECK (char_length(name) <= 255),
    role            text NOT NULL DEFAULT 'viewer'
                    CHECK (role IN ('viewer', 'support', 'operator', 'privacy', 'admin')),
    disabled_at     timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, user_id)
);
CREATE UNIQUE INDEX members_email ON members (organization_id, lower(email));  -- log in by e-mail; one seat a person
SELECT tenancy.protect('members');
GRANT SELECT, INSERT, UPDATE, DELETE ON members TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE api_keys (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    name            text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 100),
    prefix          text NOT NULL CHECK (char_length(prefix) BETWEEN 4 AND 20),   -- what a person sees of the key
    key_hash        bytea NOT NULL UNIQUE CHECK (octet_length(key_hash) = 32),    -- sha256; the key itself is not kept
    scopes          text[] NOT NULL DEFAULT '{}',
    created_by      uuid,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_used_at    timestamptz,
    expires_at      timestamptz,
    revoked_at      timestamptz,
    UNIQUE (organization_id, id),
    FOREIGN KEY (organization_id, created_by) REFERENCES members (organization_id, id) ON DELETE SET NULL (created_by)
);
CREATE INDEX api_keys_organization ON api_keys (organization_id, created_at DESC);  -- the list on the settings page
SELECT tenancy.protect('api_keys');
GRANT SELECT, INSERT, UPDATE, DELETE ON api_keys TO afluente_app, afluente_admin;
GRANT SELECT, UPDATE ON api_keys TO afluente_worker;

-- What people and the system did: member changes, erasures, secret rotations, writes that need review. Insert-only, and
-- partitioned because old rows leave as whole months, once archived.
CREATE TABLE audit_logs (
    id              uuid NOT NULL DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    actor_kind      text NOT NULL DEFAULT 'system' CHECK (actor_kind IN ('member', 'api_key', 'worker', 'system')),
    actor_id        text CHECK (char_length(actor_id) <= 255),
    action          text NOT NULL CHECK (action ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' AND char_length(action) <= 100),
    entity_kind     text CHECK (char_length(entity_kind) <= 100),
    entity_id       text CHECK (char_length(entity_id) <= 255),
    details         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object'),
    metadata        jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(metadata) = 'object'),
    needs_review    boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    request_id      text GENERATED ALWAYS AS (metadata ->> 'request_id') STORED,
    trace_id        text GENERATED ALWAYS AS (metadata ->> 'trace_id') STORED,
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);
CREATE INDEX audit_logs_organization ON audit_logs (organization_id, created_at DESC);  -- the audit page
CREATE INDEX audit_logs_entity ON audit_logs (organization_id, entity_kind, entity_id, created_at DESC);  -- one thing's history
CREATE INDEX audit_logs_request ON audit_logs (request_id) WHERE request_id IS NOT NULL;  -- all of request X
CREATE INDEX audit_logs_trace ON audit_logs (trace_id) WHERE trace_id IS NOT NULL;
SELECT tenancy.protect('audit_logs');
GRANT SELECT, INSERT ON audit_logs TO afluente_app, afluente_admin, afluente_worker;

-- What a person should look at. One open alert for each cause: a second sighting raises `occurrences`.
CREATE TABLE alerts (
    id               uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id  uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    kind             text NOT NULL CHECK (char_length(kind) BETWEEN 1 AND 100),
    severity         text NOT NULL DEFAULT 'warning' CHECK (severity IN ('info', 'warning', 'critical')),
    audience         text NOT NULL DEFAULT 'operators' CHECK (audience IN ('operators', 'admins', 'dpo')),
    title            text NOT NULL CHECK (char_length(title) BETWEEN 1 AND 255),
    details          jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object'),
    dedupe_key       text NOT NULL CHECK (char_length(dedupe_key) BETWEEN 1 AND 255),
    event_id         uuid,
    status           text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'acknowledged', 'resolved')),
    occurrences      integer NOT NULL DEFAULT 1 CHECK (occurrences > 0),
    first_seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    acknowledged_by  uuid,
    acknowledged_at  timestamptz,
    resolved_at      timestamptz,
    UNIQUE (organization_id, id),
    FOREIGN KEY (organization_id, acknowledged_by)
        REFERENCES members (organization_id, id) ON DELETE SET NULL (acknowledged_by)
);
CREATE UNIQUE INDEX alerts_one_open ON alerts (organization_id, dedupe_key) WHERE status <> 'resolved';
CREATE INDEX alerts_organization ON alerts (organization_id, status, last_seen_at DESC);  -- the alerts page
SELECT tenancy.protect('alerts');
GRANT SELECT, INSERT, UPDATE ON alerts TO afluente_app, afluente_admin, afluente_worker;

INSERT INTO afluente.monthly_partitioned (table_name) VALUES ('audit_logs');
SELECT afluente.ensure_partitions((clock_timestamp() AT TIME ZONE 'UTC' + interval '3 months')::date);
