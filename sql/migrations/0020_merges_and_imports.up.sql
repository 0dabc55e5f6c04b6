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

-- The summaries of a person are those of all its ids: what was counted for a contact before it was merged is read with the one
-- that stayed, from the moment of the merge, whether the stream application has moved it yet or not. One contact's are
-- found by index: through the primary key of the summaries, and through contacts_merged_idx.
CREATE OR REPLACE VIEW contact_metrics_summary_v WITH (security_invoker = true) AS
SELECT
    md5(s.organization_id::text || s.contact_id::text || s.metric_name)::uuid AS id,
    s.organization_id,
    s.contact_id,
    s.metric_name,
    s.event_count,
    t.total_value,
    t.currency,
    coalesce(t.totals, '{}'::jsonb) AS totals,
    s.first_event_at,
    s.last_event_at,
    s.updated_at
FROM (
    SELECT
        o.generation,
        o.organization_id,
        o.contact_id,
        o.metric_name,
        sum(o.event_count)::bigint AS event_count,
        min(o.first_event_at) AS first_event_at,
        max(o.last_event_at) AS last_event_at,
        max(o.updated_at) AS updated_at
    FROM (
        SELECT
            k.generation, k.organization_id, k.contact_id, k.metric_name, k.event_count, k.first_event_at, k.last_event_at,
            k.updated_at
        FROM contact_metrics_summary AS k
        WHERE k.generation = (SELECT g.generation FROM stream_generation AS g WHERE g.state = 'live')
            AND NOT EXISTS (
                SELECT FROM contacts AS c
                WHERE c.organization_id = k.organization_id AND c.id = k.contact_id AND c.merged_into IS NOT NULL)
        UNION ALL
        SELECT
            k.generation, k.organization_id, c.merged_into, k.metric_name, k.event_count, k.first_event_at,
            k.last_event_at, k.updated_at
        FROM contacts AS c
        JOIN contact_metrics_summary AS k ON k.organization_id = c.organization_id AND k.contact_id = c.id
        WHERE c.merged_into IS NOT NULL
            AND k.generation = (SELECT g.generation FROM stream_generation AS g WHERE g.state = 'live')
    ) AS o
    GROUP BY o.generation, o.organization_id, o.contact_id, o.metric_name
) AS s
LEFT JOIN LATERAL (
    SELECT
        CASE WHEN count(*) = 1 THEN min(c.total_value) END AS total_value,
        CASE WHEN count(*) = 1 THEN min(c.currency) END AS currency,
        jsonb_object_agg(c.currency, c.total_value) AS totals
    FROM (
        SELECT y.currency, sum(y.total_value) AS total_value
        FROM contact_metrics_summary_currency AS y
        WHERE y.generation = s.generation
            AND y.organization_id = s.organization_id
            AND y.contact_id = ANY (ARRAY(
                SELECT s.contact_id
                UNION ALL
                SELECT m.id FROM contacts AS m
                WHERE m.organization_id = s.organization_id AND m.merged_into = s.contact_id))
            AND y.metric_name = s.metric_name
        GROUP BY y.currency
    ) AS c
) AS t ON true;

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
