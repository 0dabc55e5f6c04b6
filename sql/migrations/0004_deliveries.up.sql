-- What each worker has done with each event. The seed kept one status and one attempt count on the event itself, so that
-- one worker's failure hid the event from the others; here every (worker, event, target) has its own.

-- Which worker is expected to take which event types; each worker writes its own rows when it starts. '*' is every type
-- but those of the webhook family.
CREATE TABLE worker_event_types (
    worker      text NOT NULL CHECK (worker ~ '^[a-z][a-z0-9-]*-worker$'),
    event_type  text NOT NULL CHECK (event_type = '*' OR event_type ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$'),
    PRIMARY KEY (worker, event_type)
);
GRANT SELECT ON worker_event_types TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_event_types TO afluente_worker;

-- The living processes of the workers. One row is renewed for all claims of a process: renewing each claim would rewrite
-- thousands of rows every half minute.
CREATE TABLE worker_process (
    id          uuid PRIMARY KEY,
    worker      text NOT NULL,
    host        text NOT NULL,
    pid         integer NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    renewed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
GRANT SELECT ON worker_process TO afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_process TO afluente_worker;

CREATE TABLE event_delivery (
    event_created_at  timestamptz NOT NULL,
    worker            text NOT NULL,
    event_id          uuid NOT NULL,
    target            text NOT NULL DEFAULT '',
    organization_id   uuid NOT NULL,
    event_type        text NOT NULL,
    key               text NOT NULL,
    state             text NOT NULL
                      CHECK (state IN ('claimed', 'waiting', 'blocked', 'done', 'skipped', 'dead', 'needs_review', 'discarded')),
    attempts          smallint NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    generation        integer NOT NULL DEFAULT 0 CHECK (generation >= 0),
    -- Each taking counts up; a run may record its outcome only under the number it was given.
    claim             integer NOT NULL DEFAULT 0,
    -- NULL while claimed: known, and in nobody's hands (targets fixed but not begun, or handed back by a stop).
    claimed_by        uuid,
    next_attempt_at   timestamptz,
    error_class       text,
    last_error        text,
    first_failure_at  timestamptz,
    -- Where its record was read, once something went wrong.
    origin_topic      text,
    origin_partition  integer,
    origin_offset     bigint,
    -- The dead-letter record, once the broker has it.
    dead_partition    integer,
    dead_offset       bigint,
    -- The record itself, while it waits in Postgres: longer than the longest retry topic, or behind its key.
    kept_key          bytea,
    kept_value        bytea,
    kept_headers      jsonb,
    -- Order of the blocked ones of a key.
    block_order       bigint,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at       timestamptz,
    PRIMARY KEY (event_created_at, worker, event_id, target),
    CHECK (state <> 'waiting' OR next_attempt_at IS NOT NULL),
    CHECK (state <> 'blocked' OR (kept_value IS NOT NULL AND block_order IS NOT NULL)),
    CHECK (kept_value IS NULL OR state IN ('waiting', 'blocked', 'dead')),  -- dead: until the dead-letter topic has it
    CHECK (claimed_by IS NULL OR state = 'claimed'),
    CHECK ((finished_at IS NOT NULL) = (state IN ('done', 'skipped', 'dead', 'discarded')))
) PARTITION BY RANGE (event_created_at);
COMMENT ON TABLE event_delivery IS 'What one worker has done with one event for one target.';
COMMENT ON COLUMN event_delivery.event_created_at IS 'The event''s created_at, from the record, never the clock: a late duplicate must meet its row.';

-- Serves: what is due among the deliveries that wait in Postgres, and what died while it waited there.
CREATE INDEX event_delivery_kept ON event_delivery (worker, next_attempt_at)
    WHERE state IN ('waiting', 'dead') AND kept_value IS NOT NULL;
-- Serves: what of this key is in front of me, and who comes next.
CREATE INDEX event_delivery_key ON event_delivery (worker, key, block_order) WHERE state IN ('claimed', 'waiting', 'blocked');
-- Serves: the claims of a process that is gone.
CREATE INDEX event_delivery_claimed ON event_delivery (claimed_by) WHERE claimed_by IS NOT NULL;
-- Serves: the list of dead letters, of one organization and of all.
CREATE INDEX event_delivery_dead ON event_delivery (organization_id, worker, updated_at) WHERE state IN ('dead', 'needs_review');
-- Serves: a dead letter, or what waits, by its event.
CREATE INDEX event_delivery_open ON event_delivery (event_id) WHERE state IN ('claimed', 'waiting', 'blocked', 'dead', 'needs_review');

CREATE SEQUENCE event_delivery_block_order;
GRANT USAGE ON SEQUENCE event_delivery_block_order TO afluente_worker;

SELECT tenancy.protect('event_delivery');
GRANT SELECT ON event_delivery TO afluente_app, afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON event_delivery TO afluente_worker;

INSERT INTO afluente.monthly_partitioned (table_name) VALUES ('event_delivery');
SELECT afluente.ensure_partitions((clock_timestamp() AT TIME ZONE 'UTC' + interval '3 months')::date);

-- Records whose bytes are no event: they have no event id, and no organization that could be trusted. The bytes are in
-- the dead-letter topic; here is only where, and why.
CREATE TABLE undecodable_record (
    worker            text NOT NULL,
    topic             text NOT NULL,
    partition         integer NOT NULL,
    record_offset     bigint NOT NULL,
    record_timestamp  timestamptz NOT NULL,  -- a topic made anew counts its offsets from 0 again
    error_class       text NOT NULL,
    error             text NOT NULL,
    size_bytes        integer NOT NULL,
    state             text NOT NULL DEFAULT 'dead' CHECK (state IN ('dead', 'reprocessed', 'discarded')),
    dead_partition    integer,
    dead_offset       bigint,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (worker, topic, partition, record_offset, record_timestamp)
);
GRANT SELECT, INSERT, UPDATE, DELETE ON undecodable_record TO afluente_worker;

-- The seed's columns for each event, counted from the deliveries: dead if any is dead, done if every expected worker has
-- finished (or none is expected), processing while one is in somebody's hands, else pending. The caller's own row-level
-- security applies.
CREATE VIEW event_log_status WITH (security_invoker = true) AS
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata,
       e.request_id, e.trace_id, e.created_at,
       COALESCE(d.consumed_by, '{}') AS consumed_by,
       COALESCE(d.attempts, 0)::smallint AS attempts,
       d.last_error,
       d.next_attempt_at,
       CASE
           WHEN d.any_dead THEN 'dead'
           WHEN d.any_claimed THEN 'processing'
           WHEN d.any_open THEN 'pending'
           WHEN EXISTS (
               SELECT FROM worker_event_types w
                WHERE (w.event_type = e.event_type OR (w.event_type = '*' AND e.event_type NOT LIKE 'webhook.%'))
                  AND NOT w.worker = ANY (COALESCE(d.seen_by, '{}'))
           ) THEN 'pending'
           ELSE 'done'
       END AS status,
       GREATEST(e.created_at, d.updated_at) AS updated_at
  FROM event_log e
  LEFT JOIN LATERAL (
       SELECT array_agg(w.worker ORDER BY w.worker) FILTER (WHERE w.finished) AS consumed_by,
              array_agg(w.worker) AS seen_by,
              max(w.attempts) AS attempts,
              (array_agg(w.last_error ORDER BY w.updated_at DESC) FILTER (WHERE w.last_error IS NOT NULL))[1] AS last_error,
              min(w.next_attempt_at) AS next_attempt_at,
              bool_or(w.any_dead) AS any_dead,
              bool_or(w.any_claimed) AS any_claimed,
              bool_or(w.any_open) AS any_open,
              max(w.updated_at) AS updated_at
         FROM (
              SELECT d.worker,
                     bool_and(d.state IN ('done', 'skipped', 'discarded')) AS finished,
                     bool_or(d.state IN ('dead', 'needs_review')) AS any_dead,
                     bool_or(d.state = 'claimed') AS any_claimed,
                     bool_or(d.state IN ('waiting', 'blocked')) AS any_open,
                     max(d.attempts) AS attempts,
                     (array_agg(d.last_error ORDER BY d.updated_at DESC) FILTER (WHERE d.state <> 'done'))[1] AS last_error,
                     min(d.next_attempt_at) FILTER (WHERE d.state = 'waiting') AS next_attempt_at,
                     max(d.updated_at) AS updated_at
                FROM event_delivery d
               WHERE d.event_created_at = e.created_at
                 AND d.event_id = e.id
               GROUP BY d.worker
         ) w
  ) d ON true;
GRANT SELECT ON event_log_status TO afluente_app, afluente_admin, afluente_worker;
