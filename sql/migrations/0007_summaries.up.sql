-- What the stream application folds contact events into, and what makes it exact.
--
-- Everything is kept for each generation, so that a rebuild can grow beside what people read and be switched to in one
-- transaction. No foreign key to contacts or organizations: a summary follows from records, which may arrive before, or
-- outlive, the row they speak of.

-- The generations of the summaries. People read the live one.
CREATE TABLE stream_generation (
    generation integer PRIMARY KEY CHECK (generation > 0),
    state text NOT NULL CHECK (state IN ('building', 'live', 'retired')),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    live_at timestamptz,
    CHECK (state = 'building' OR live_at IS NOT NULL)
);

CREATE UNIQUE INDEX stream_generation_one_live ON stream_generation (state) WHERE state = 'live';

INSERT INTO stream_generation (generation, state, live_at)
VALUES (1, 'live', clock_timestamp());

-- How often a metric happened to a contact, and between when.
CREATE TABLE contact_metrics_summary (
    generation integer NOT NULL REFERENCES stream_generation,
    organization_id uuid NOT NULL,
    contact_id uuid NOT NULL,
    metric_name text NOT NULL CHECK (char_length(metric_name) BETWEEN 1 AND 255),
    event_count bigint NOT NULL CHECK (event_count > 0),
    first_event_at timestamptz NOT NULL,
    last_event_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (generation, organization_id, contact_id, metric_name),
    CHECK (first_event_at <= last_event_at)
);

-- The sum of the values in one currency. Reais and dollars are never added up.
CREATE TABLE contact_metrics_summary_currency (
    generation integer NOT NULL,
    organization_id uuid NOT NULL,
    contact_id uuid NOT NULL,
    metric_name text NOT NULL,
    currency text NOT NULL CHECK (char_length(currency) BETWEEN 1 AND 16),
    total_value numeric NOT NULL CHECK (total_value NOT IN ('NaN', 'Infinity', '-Infinity')),
    value_count bigint NOT NULL CHECK (value_count > 0),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (generation, organization_id, contact_id, metric_name, currency),
    FOREIGN KEY (generation, organization_id, contact_id, metric_name)
        REFERENCES contact_metrics_summary ON DELETE CASCADE
);

-- The fence: every record of the partition below next_offset is in the summaries, none at or above it is. It moves in the
-- transaction that writes the summaries. Kafka's own committed offset is for display.
CREATE TABLE stream_offset (
    generation integer NOT NULL REFERENCES stream_generation,
    topic text NOT NULL,
    partition integer NOT NULL CHECK (partition >= 0),
    next_offset bigint NOT NULL DEFAULT 0 CHECK (next_offset >= 0),
    -- Kafka's own id of the topic. Offsets of a topic that was deleted and made anew mean something else.
    topic_id text NOT NULL,
    -- Who was assigned the partition last. A process that was taken for dead finds another name here and cannot write.
    claimed_by uuid NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (generation, topic, partition)
);

-- Contact events already counted. The fence keeps out what Kafka delivers again; this keeps out what was produced twice.
-- A row is needed as long as a producer may still send its event again.
CREATE TABLE stream_seen_event (
    generation integer NOT NULL REFERENCES stream_generation,
    organization_id uuid NOT NULL,
    contact_event_id uuid NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (generation, organization_id, contact_event_id)
);

-- Finds what may be forgotten; a btree would double the cost of every insert.
CREATE INDEX stream_seen_event_by_age ON stream_seen_event USING brin (seen_at);

-- Records that could not be folded, whole, with the reason. organization_id is the record's key where that is a UUID.
CREATE TABLE stream_dead_letter (
    id uuid NOT NULL DEFAULT uuidv7() PRIMARY KEY,
    generation integer NOT NULL REFERENCES stream_generation,
    topic text NOT NULL,
    partition integer NOT NULL,
    record_offset bigint NOT NULL,
    organization_id uuid,
    record_key bytea,
    record_value bytea,
    record_headers jsonb NOT NULL DEFAULT '[]',
    error_class text NOT NULL,
    reason text NOT NULL CHECK (char_length(reason) <= 1000),
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (generation, topic, partition, record_offset)
);

SELECT tenancy.protect('contact_metrics_summary');
SELECT tenancy.protect('contact_metrics_summary_currency');
SELECT tenancy.protect('stream_seen_event');
SELECT tenancy.protect('stream_dead_letter');

-- Applications read summaries; only the stream application writes them.
GRANT SELECT ON contact_metrics_summary, contact_metrics_summary_currency, stream_generation
    TO afluente_app, afluente_admin;
GRANT SELECT ON stream_offset, stream_dead_letter TO afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE
    ON contact_metrics_summary, contact_metrics_summary_currency, stream_offset, stream_seen_event, stream_dead_letter,
       stream_generation
    TO afluente_worker;

-- The metrics seed's columns, at the live generation. id is derived, so that a rebuild gives the same one. total_value
-- and currency are filled when there is exactly one currency; totals has them all.
CREATE VIEW contact_metrics_summary_v WITH (security_invoker = true) AS
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
FROM stream_generation AS g
JOIN contact_metrics_summary AS s ON s.generation = g.generation
LEFT JOIN LATERAL (
    SELECT
        CASE WHEN count(*) = 1 THEN min(c.total_value) END AS total_value,
        CASE WHEN count(*) = 1 THEN min(c.currency) END AS currency,
        jsonb_object_agg(c.currency, c.total_value) AS totals
    FROM contact_metrics_summary_currency AS c
    WHERE c.generation = s.generation
        AND c.organization_id = s.organization_id
        AND c.contact_id = s.contact_id
        AND c.metric_name = s.metric_name
) AS t ON true
WHERE g.state = 'live';

GRANT SELECT ON contact_metrics_summary_v TO afluente_app, afluente_worker, afluente_admin;
