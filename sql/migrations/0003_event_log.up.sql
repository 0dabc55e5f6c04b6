-- The outbox: event_log, what makes an emission happen once (event_idempotency), what waits for its time (deferred_event),
-- and the seals that let the relay leave old months alone.

-- Months of event_log that are published to the last row. A month gets its boundary when it has ended: every transaction
-- begun before that has a lower id. It is sealed once the relay's position is past the boundary.
CREATE TABLE event_log_seal (
    month       date PRIMARY KEY CHECK (month = date_trunc('month', month)),
    ends_at     timestamptz NOT NULL,
    boundary    xid8 NOT NULL,
    boundary_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sealed_at   timestamptz
);
COMMENT ON TABLE event_log_seal IS 'Months of event_log into which nothing can be written any more, and those about to be.';
SELECT tenancy.revoke_all('event_log_seal');
GRANT SELECT ON event_log_seal TO afluente_worker;

-- When an event written now happened. Never in a sealed month, even when the clock has stepped back into one: the relay
-- does not look there.
CREATE FUNCTION afluente.event_clock() RETURNS timestamptz
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT greatest(clock_timestamp(), max(s.ends_at)) FROM public.event_log_seal s WHERE s.sealed_at IS NOT NULL
$$;
REVOKE ALL ON FUNCTION afluente.event_clock() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.event_clock() TO afluente_app, afluente_worker, afluente_admin;

CREATE TABLE event_log (
    seq             bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),  -- a larger cache would break the relay's order
    id              uuid NOT NULL DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    event_type      text NOT NULL,
    entity_kind     text NOT NULL,
    entity_id       uuid,
    payload         jsonb NOT NULL DEFAULT '{}',
    metadata        jsonb NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT afluente.event_clock(),
    tx_id           xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- of the top level; xmin shows a savepoint's
    request_id      text GENERATED ALWAYS AS (metadata ->> 'request_id') STORED,
    trace_id        text GENERATED ALWAYS AS (metadata ->> 'trace_id') STORED,
    PRIMARY KEY (id, created_at),
    CONSTRAINT event_type_format
        CHECK (event_type ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' AND char_length(event_type) <= 100),
    CONSTRAINT entity_kind_format CHECK (entity_kind ~ '^[a-z][a-z0-9_]*$' AND char_length(entity_kind) <= 100),
    CONSTRAINT payload_object CHECK (jsonb_typeof(payload) = 'object'),
    CONSTRAINT metadata_object CHECK (jsonb_typeof(metadata) = 'object'),
    CONSTRAINT correlation_length CHECK (char_length(request_id) <= 255 AND char_length(trace_id) <= 255)
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE event_log IS 'The outbox: committed facts, written by emit_event only, published to Kafka by the relay.';
COMMENT ON COLUMN event_log.metadata IS
    'request_id, actor_id, source, trace_id, idempotency_key, schema_version, emitted_at; causation_id, causation_depth, traceparent';

CREATE INDEX event_log_seq ON event_log (seq);                                        -- relay: seq > t1, and the highest seq
CREATE INDEX event_log_tx ON event_log (tx_id, seq);                                  -- relay: tx_id >= xmax(s1), in-progress list
CREATE INDEX event_log_org_type ON event_log (organization_id, event_type, created_at DESC);  -- one type of one tenant
CREATE INDEX event_log_entity ON event_log (entity_kind, entity_id, created_at DESC);         -- one thing's history
CREATE INDEX event_log_request ON event_log (request_id) WHERE request_id IS NOT NULL;        -- all of request X
CREATE INDEX event_log_trace ON event_log (trace_id) WHERE trace_id IS NOT NULL;

SELECT tenancy.protect('event_log');
GRANT SELECT ON event_log TO afluente_app, afluente_admin, afluente_worker;

-- Append-only, for its owner too. Erasure and restamping after a restore say so in the setting afluente.rewrite.
CREATE FUNCTION afluente.refuse_rewrite() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF COALESCE(current_setting('afluente.rewrite', true), '') NOT IN ('erasure', 'restamp') THEN
        RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, lower(TG_OP)
            USING ERRCODE = 'AF009', HINT = 'Emit a new event. Only erasure and restamping may change rows.';
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END;
$$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON event_log
    FOR EACH ROW EXECUTE FUNCTION afluente.refuse_rewrite();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON event_log
    FOR EACH STATEMENT EXECUTE FUNCTION afluente.refuse_rewrite();

-- On the partitions of sealed months only, so that the months still written to pay nothing for it.
CREATE FUNCTION afluente.refuse_sealed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'created_at % lies in a sealed month', NEW.created_at
        USING ERRCODE = 'AF008', HINT = 'Leave created_at to its default: the relay does not read sealed months again.';
END;
$$;

CREATE FUNCTION afluente.event_log_partitions(OUT partition regclass, OUT month date, OUT ends_at timestamptz)
RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.partition, m.month, (m.month + interval '1 month') AT TIME ZONE 'UTC'
      FROM (SELECT c.oid::regclass AS partition,
                   to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM') AS month
              FROM pg_inherits i
              JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'public.event_log'::regclass) m
$$;
REVOKE ALL ON FUNCTION afluente.event_log_partitions() FROM PUBLIC;

CREATE TABLE event_idempotency (
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    key             text NOT NULL CHECK (char_length(key) BETWEEN 1 AND 255),
    event_id        uuid NOT NULL,
    payload_hash    bytea NOT NULL CHECK (octet_length(payload_hash) = 32),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, key)
);
CREATE INDEX event_idempotency_created ON event_idempotency (created_at);            -- afluente.purge_idempotency
CREATE INDEX event_idempotency_event ON event_idempotency (organization_id, event_id);  -- cancel_deferred gives the key back
SELECT tenancy.protect('event_idempotency');
GRANT SELECT ON event_idempotency TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE deferred_event (
    id              uuid PRIMARY KEY,
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    event_type      text NOT NULL,
    entity_kind     text NOT NULL,
    entity_id       uuid,
    payload         jsonb NOT NULL,
    metadata        jsonb NOT NULL,
    deliver_at      timestamptz NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT event_type_format
        CHECK (event_type ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' AND char_length(event_type) <= 100),
    CONSTRAINT entity_kind_format CHECK (entity_kind ~ '^[a-z][a-z0-9_]*$' AND char_length(entity_kind) <= 100)
);
COMMENT ON TABLE deferred_event IS 'Events with a deliver_at still to come, under the ids they will have in event_log.';
CREATE INDEX deferred_event_due ON deferred_event (deliver_at, id);                       -- release_due_deferred
CREATE INDEX deferred_event_entity ON deferred_event (organization_id, entity_kind, entity_id);  -- what waits for this thing
SELECT tenancy.protect('deferred_event');
GRANT SELECT ON deferred_event TO afluente_app, afluente_admin, afluente_worker;

INSERT INTO afluente.monthly_partitioned (table_name) VALUES ('event_log');
SELECT afluente.ensure_partitions((clock_timestamp() AT TIME ZONE 'UTC' + interval '3 months')::date);

REVOKE ALL ON FUNCTION afluente.refuse_rewrite(), afluente.refuse_sealed() FROM PUBLIC;
