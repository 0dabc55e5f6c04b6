-- Two contacts that are one person, and facts about contacts that come from files.
--
-- Before: contacts.merged_into was there and nothing set it; a row could be written for a contact that had been merged away;
-- contact events could be asked for by contact only, not by organization and period.

-- Serves: the contacts merged into one (afluente.contact_ids), and merging on.
CREATE INDEX contacts_merged_idx ON contacts (organization_id, merged_into) WHERE merged_into IS NOT NULL;

-- Serves: the events of an organization in a period, all of them, by metric, by contact event type.
CREATE INDEX contact_events_period_idx ON contact_events (organization_id, occurred_at, id);
CREATE INDEX contact_events_metric_period_idx ON contact_events (organization_id, metric_name, occurred_at, id)
    WHERE metric_name IS NOT NULL;
CREATE INDEX contact_events_type_period_idx ON contact_events (organization_id, event_type, occurred_at, id)
    WHERE event_type IS NOT NULL;

-- What is written for a contact that was merged away goes to the one that stayed, whoever writes it; what is written while
-- it is being merged waits for the end of that, and follows.
CREATE FUNCTION afluente.follow_merge() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- None: the foreign key has the words for it.
    NEW.contact_id := COALESCE(afluente.surviving_contact(NEW.organization_id, NEW.contact_id), NEW.contact_id);
    RETURN NEW;
END;
$$;
REVOKE ALL ON FUNCTION afluente.follow_merge() FROM PUBLIC;
CREATE TRIGGER follow_merge BEFORE INSERT ON contact_identities FOR EACH ROW EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON contact_tag_links FOR EACH ROW EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON conversations FOR EACH ROW EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON leads FOR EACH ROW EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.contact_id IS NOT NULL)
    EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON automation_runs FOR EACH ROW WHEN (NEW.contact_id IS NOT NULL)
    EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON tracked_links FOR EACH ROW WHEN (NEW.contact_id IS NOT NULL)
    EXECUTE FUNCTION afluente.follow_merge();
CREATE TRIGGER follow_merge BEFORE INSERT ON link_clicks FOR EACH ROW WHEN (NEW.contact_id IS NOT NULL)
    EXECUTE FUNCTION afluente.follow_merge();

-- One event of a batch (record_contact_events): a fact, and who it is about.
CREATE TYPE afluente.contact_event_item AS (
    n                   integer,
    contact_id          uuid,
    phone               text,
    phone_as_received   text,
    email               text,
    contact_external_id text,
    contact_source      text,
    name                text,
    event_type          text,
    metric_name         text,
    source              text,
    source_type         text,
    external_event_id   text,
    unique_event_id     text,
    object_id           text,
    object_id_ref       text,
    entity_type         text,
    entity_id           text,
    value               numeric,
    currency            text,
    occurred_at         timestamptz,
    received_at         timestamptz,
    properties          jsonb,
    raw_payload         jsonb,
    integration_id      uuid
);

-- Imports of contact events, by the file's content: what a run had committed when it was killed is left out by the next one.
CREATE TABLE contact_event_import (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    file_name       text NOT NULL CHECK (char_length(file_name) BETWEEN 1 AND 255),
    file_sha256     bytea NOT NULL CHECK (octet_length(file_sha256) = 32),
    batch_rows      integer NOT NULL CHECK (batch_rows > 0),  -- so many of its rows are one batch
    options         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(options) = 'object'),
    started_by      text CHECK (char_length(started_by) <= 255),
    started_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at     timestamptz,
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, file_sha256)
);
SELECT tenancy.protect('contact_event_import');
GRANT SELECT, INSERT, UPDATE, DELETE ON contact_event_import TO afluente_app, afluente_admin, afluente_worker;

-- The batches that are through, each written in the transaction that records its facts. Several are under way at once, so
-- the last line alone would not say where to go on.
CREATE TABLE contact_event_import_batch (
    organization_id  uuid NOT NULL,
    import_id        uuid NOT NULL,
    batch            integer NOT NULL CHECK (batch >= 0),
    last_line        bigint NOT NULL CHECK (last_line > 0),
    recorded         integer NOT NULL DEFAULT 0 CHECK (recorded >= 0),
    duplicates       integer NOT NULL DEFAULT 0 CHECK (duplicates >= 0),
    rejected         integer NOT NULL DEFAULT 0 CHECK (rejected >= 0),
    contacts_created integer NOT NULL DEFAULT 0 CHECK (contacts_created >= 0),
    errors           jsonb NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(errors) = 'array'),  -- [line, reason] of each rejected one
    committed_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, import_id, batch),
    FOREIGN KEY (organization_id, import_id) REFERENCES contact_event_import (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('contact_event_import_batch');
GRANT SELECT, INSERT, UPDATE, DELETE ON contact_event_import_batch TO afluente_app, afluente_admin, afluente_worker;
