-- What an organization has done by itself: automations and their runs; and links whose clicks are facts about a contact.

-- The row says what starts it and whether it may; what it does is in its newest version. trigger_type and trigger_metric
-- are the metrics seed's words: __webhook__ and __schedule__ stand where no metric does.
CREATE TABLE automations (
    id                 uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id    uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    name               text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 100),
    description        text NOT NULL DEFAULT '' CHECK (char_length(description) <= 1000),
    status             text NOT NULL DEFAULT 'disabled' CHECK (status IN ('enabled', 'paused', 'disabled')),
    version            integer NOT NULL DEFAULT 1 CHECK (version >= 1),
    trigger_type       text NOT NULL CHECK (char_length(trigger_type) BETWEEN 1 AND 100),
    trigger_metric     text CHECK (char_length(trigger_metric) BETWEEN 1 AND 100),
    trigger_event_type text CHECK (char_length(trigger_event_type) BETWEEN 1 AND 100),  -- of a contact event, or of the bus
    next_due_at        timestamptz,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, name),
    CHECK ((trigger_metric IS NULL) <> (trigger_event_type IS NULL)),
    CHECK (next_due_at IS NULL OR trigger_metric = '__schedule__')
);
COMMENT ON COLUMN automations.status IS
    'paused: nothing starts, and what wakes up is held until it is enabled. disabled: nothing starts, what waited is cancelled.';
CREATE INDEX automations_metric ON automations (organization_id, trigger_metric) WHERE status = 'enabled';          -- who is started
CREATE INDEX automations_event_type ON automations (organization_id, trigger_event_type) WHERE status = 'enabled';  -- who is started
CREATE INDEX automations_due ON automations (next_due_at) WHERE status = 'enabled' AND next_due_at IS NOT NULL;      -- the hook
SELECT tenancy.protect('automations');
GRANT SELECT, INSERT, UPDATE ON automations TO afluente_app, afluente_admin, afluente_worker;

-- An edit is a new version; a run goes on with the one it began with.
CREATE TABLE automation_versions (
    organization_id uuid NOT NULL,
    automation_id   uuid NOT NULL,
    version         integer NOT NULL CHECK (version >= 1),
    definition      jsonb NOT NULL CHECK (jsonb_typeof(definition) = 'object'),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, automation_id, version),
    FOREIGN KEY (organization_id, automation_id) REFERENCES automations (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('automation_versions');
GRANT SELECT, INSERT ON automation_versions TO afluente_app, afluente_admin, afluente_worker;

-- What its calls outside are signed with ('signing') and what their headers carry. Sealed for one automation and name.
CREATE TABLE automation_secrets (
    organization_id uuid NOT NULL,
    automation_id   uuid NOT NULL,
    name            text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_]{0,62}$'),
    sealed          text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, automation_id, name),
    FOREIGN KEY (organization_id, automation_id) REFERENCES automations (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('automation_secrets');
-- Applications write and replace secrets; only the role that makes the calls reads them.
GRANT INSERT, DELETE ON automation_secrets TO afluente_app, afluente_admin;
GRANT SELECT (organization_id, automation_id, name, created_at) ON automation_secrets TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON automation_secrets TO afluente_worker;

-- One for each event that started it: an event that comes again starts nothing. `position` is the step that is next, or
-- under way. The context is what the event said, for the steps that are still to come: a run that is done has none.
CREATE TABLE automation_runs (
    id                 uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id    uuid NOT NULL,
    automation_id      uuid NOT NULL,
    version            integer NOT NULL,
    contact_id         uuid,
    trigger_event_id   uuid NOT NULL,
    trigger_event_type text NOT NULL CHECK (char_length(trigger_event_type) <= 100),
    causation_depth    integer NOT NULL DEFAULT 0 CHECK (causation_depth >= 0),
    request_id         text CHECK (char_length(request_id) <= 255),
    trace_id           text CHECK (char_length(trace_id) <= 255),
    traceparent        text CHECK (char_length(traceparent) <= 255),
    state              text NOT NULL DEFAULT 'running'
                       CHECK (state IN ('running', 'waiting', 'calling', 'held', 'done', 'failed', 'stopped', 'cancelled')),
    reason             text CHECK (char_length(reason) <= 255),
    position           integer NOT NULL DEFAULT 0 CHECK (position >= 0),
    wake_at            timestamptz,
    wake_event_id      uuid,
    context            jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(context) = 'object'),
    started_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at        timestamptz,
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, automation_id, trigger_event_id),
    CHECK ((state IN ('done', 'failed', 'stopped', 'cancelled')) = (finished_at IS NOT NULL)),
    CHECK (wake_at IS NULL OR state IN ('waiting', 'held')),
    FOREIGN KEY (organization_id, automation_id, version)
        REFERENCES automation_versions (organization_id, automation_id, version) ON DELETE CASCADE,
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id)
);
COMMENT ON COLUMN automation_runs.causation_depth IS 'Of the event that started it; what the run emits is one deeper.';
CREATE INDEX automation_runs_list ON automation_runs (organization_id, automation_id, started_at DESC);  -- afluente automation runs
CREATE INDEX automation_runs_contact ON automation_runs (organization_id, contact_id, started_at DESC);  -- one contact's, erasure
CREATE INDEX automation_runs_open ON automation_runs (organization_id, automation_id) WHERE finished_at IS NULL;  -- pause, disable
SELECT tenancy.protect('automation_runs');
GRANT SELECT, INSERT, UPDATE ON automation_runs TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON automation_runs TO afluente_worker;  -- erasure

-- What each step did. effect_id is what it caused (a message, a request to the bot), by which its outcome finds it.
CREATE TABLE automation_step_runs (
    organization_id uuid NOT NULL,
    run_id          uuid NOT NULL,
    step            integer NOT NULL CHECK (step >= 0),
    type            text NOT NULL CHECK (char_length(type) BETWEEN 1 AND 50),
    state           text NOT NULL
                    CHECK (state IN ('done', 'skipped', 'failed', 'waiting', 'calling', 'cancelled')),
    reason          text CHECK (char_length(reason) <= 255),
    attempt         integer NOT NULL DEFAULT 1 CHECK (attempt >= 0),
    wake_at         timestamptz,
    error           text CHECK (char_length(error) <= 1000),
    effect_id       uuid,
    outcome         text CHECK (outcome IN ('pending', 'sent', 'failed')),
    outcome_at      timestamptz,
    details         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object'),
    started_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at     timestamptz,
    PRIMARY KEY (organization_id, run_id, step),
    CHECK ((state IN ('waiting', 'calling')) = (finished_at IS NULL)),
    FOREIGN KEY (organization_id, run_id) REFERENCES automation_runs (organization_id, id) ON DELETE CASCADE
);
COMMENT ON COLUMN automation_step_runs.outcome IS 'What became of what it caused, when that is known later: message.sent, message.failed, ai.responded.';
CREATE UNIQUE INDEX automation_step_runs_effect ON automation_step_runs (organization_id, effect_id)
    WHERE effect_id IS NOT NULL;  -- whose message was sent?
SELECT tenancy.protect('automation_step_runs');
GRANT SELECT, INSERT, UPDATE ON automation_step_runs TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON automation_step_runs TO afluente_worker;  -- erasure

-- An address of ours that leads to one of theirs: the stored one, whatever is asked. The token is all that a visitor shows,
-- so it is random and long; a link that is one contact's own makes its clicks that contact's.
CREATE TABLE tracked_links (
    id                uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id   uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    token             text NOT NULL UNIQUE CHECK (token ~ '^[A-Za-z0-9_-]{22,64}$'),
    -- Goes into a header as it stands: printable ASCII, https, no user or password, nothing that a parser may see otherwise.
    url               text NOT NULL CHECK (char_length(url) <= 2048
                          AND url ~ '^https://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?([/?#][!#-;=?-\[\]_a-z~]*)?$'),
    contact_id        uuid,
    automation_run_id uuid,
    step              integer,
    message_id        uuid,
    clicks            bigint NOT NULL DEFAULT 0 CHECK (clicks >= 0),
    last_clicked_at   timestamptz,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, automation_run_id)
        REFERENCES automation_runs (organization_id, id) ON DELETE SET NULL (automation_run_id),
    FOREIGN KEY (organization_id, message_id) REFERENCES messages (organization_id, id)
);
CREATE INDEX tracked_links_contact ON tracked_links (organization_id, contact_id) WHERE contact_id IS NOT NULL;  -- erasure
CREATE INDEX tracked_links_message ON tracked_links (organization_id, message_id) WHERE message_id IS NOT NULL;  -- a message's links
CREATE INDEX tracked_links_run ON tracked_links (organization_id, automation_run_id) WHERE automation_run_id IS NOT NULL;
SELECT tenancy.protect('tracked_links');
GRANT SELECT, INSERT, UPDATE (clicks, last_clicked_at) ON tracked_links TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON tracked_links TO afluente_worker;

-- Clicks that count. No address and no browser of the visitor is kept.
CREATE TABLE link_clicks (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    link_id         uuid NOT NULL,
    contact_id      uuid,
    click_key       text NOT NULL CHECK (char_length(click_key) BETWEEN 1 AND 100),
    clicked_at      timestamptz NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, link_id, click_key),
    FOREIGN KEY (organization_id, link_id) REFERENCES tracked_links (organization_id, id) ON DELETE CASCADE,
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id)
);
CREATE INDEX link_clicks_time ON link_clicks (organization_id, link_id, clicked_at DESC);  -- clicked just now?
CREATE INDEX link_clicks_contact ON link_clicks (organization_id, contact_id) WHERE contact_id IS NOT NULL;  -- erasure
SELECT tenancy.protect('link_clicks');
GRANT SELECT, INSERT ON link_clicks TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON link_clicks TO afluente_worker;
