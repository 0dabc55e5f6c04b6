-- needs: 0006
-- Records one fact about a contact and emits contact_event.recorded, both in the caller's transaction.
--
-- Returns the id of the row: of the new one, or of the one that already names this fact (nothing is emitted then).
-- Returns null, with a warning, when there is no contact. Refuses (AF) an unknown organization, an organization other
-- than the session's, and a contact of another organization. For a contact that was merged away the fact is recorded with
-- the one that stayed.
--
-- A contact event type without its metric, or a metric without its contact event type, gets the other where both name the
-- same facts (afluente.metric_of).
--
-- external_event_id is '<fact>:<source id>'. unique_event_id is derived from it when not given. value without currency
-- is BRL, the seeds' default.
CREATE OR REPLACE FUNCTION record_contact_event(
    contact_id        uuid,
    event_type        text DEFAULT NULL,
    metric_name       text DEFAULT NULL,
    source            text DEFAULT NULL,
    source_type       text DEFAULT 'EXTERNAL',
    external_event_id text DEFAULT NULL,
    unique_event_id   text DEFAULT NULL,
    object_id         text DEFAULT NULL,
    object_id_ref     text DEFAULT NULL,
    entity_type       text DEFAULT NULL,
    entity_id         text DEFAULT NULL,
    value             numeric DEFAULT NULL,
    currency          text DEFAULT NULL,
    occurred_at       timestamptz DEFAULT NULL,
    received_at       timestamptz DEFAULT NULL,
    properties        jsonb DEFAULT '{}',
    raw_payload       jsonb DEFAULT NULL,
    integration_id    uuid DEFAULT NULL,
    webhook_event_id  uuid DEFAULT NULL,
    organization_id   uuid DEFAULT NULL,
    metadata          jsonb DEFAULT '{}'
)
RETURNS uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
    _unique_event_id text := coalesce(
        record_contact_event.unique_event_id,
        record_contact_event.source || ':' || coalesce(record_contact_event.entity_type, 'event') || ':'
            || record_contact_event.external_event_id);
    _occurred_at timestamptz := coalesce(record_contact_event.occurred_at, clock_timestamp());
    _received_at timestamptz := coalesce(record_contact_event.received_at, clock_timestamp());
    _currency text := coalesce(
        record_contact_event.currency, CASE WHEN record_contact_event.value IS NOT NULL THEN 'BRL' END);
    _event_type text := coalesce(
        record_contact_event.event_type, afluente.contact_event_type_of(record_contact_event.metric_name));
    _metric_name text := coalesce(
        record_contact_event.metric_name, afluente.metric_of(record_contact_event.event_type));
    _contact_id uuid;
    _metric_id uuid;
    _category text;
    _id uuid;
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: a contact event belongs to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction (workers: act for the organization of the event).';
    END IF;
    IF record_contact_event.organization_id <> _organization_id THEN
        RAISE EXCEPTION 'organization % is not the one of this session', record_contact_event.organization_id
            USING ERRCODE = 'AF002';
    END IF;
    IF record_contact_event.contact_id IS NULL THEN
        RAISE WARNING 'contact event % of % has no contact and is not recorded',
            coalesce(record_contact_event.event_type, record_contact_event.metric_name), record_contact_event.source;
        RETURN NULL;
    END IF;
    IF NOT (_occurred_at >= '0001-01-02 00:00+00' AND _occurred_at < '9999-12-31 00:00+00') THEN
        RAISE EXCEPTION 'occurred_at is % and cannot be told on the bus', _occurred_at USING ERRCODE = 'AF004',
            HINT = 'Give a moment between the years 1 and 9999.';
    END IF;
    _contact_id := afluente.require_contact(_organization_id, record_contact_event.contact_id);

    IF _metric_name IS NOT NULL THEN
        -- It is there but for the first time.
        SELECT m.id, m.category INTO _metric_id, _category
          FROM public.metrics m
         WHERE m.organization_id = _organization_id AND m.name = _metric_name;
        IF NOT FOUND THEN
            _metric_id := afluente.ensure_metric(_organization_id, _metric_name, record_contact_event.source);
            SELECT m.category INTO STRICT _category FROM public.metrics m WHERE m.id = _metric_id;
        END IF;
    END IF;

    -- No conflict target: either unique key names the same fact.
    INSERT INTO public.contact_events (
        organization_id, contact_id, source_type, source, event_type, metric_id, metric_name, object_id, object_id_ref,
        entity_type, entity_id, properties, raw_payload, webhook_event_id, value, currency, external_event_id,
        unique_event_id, integration_id, occurred_at, received_at)
    VALUES (
        _organization_id, _contact_id, record_contact_event.source_type, record_contact_event.source,
        _event_type, _metric_id, _metric_name, record_contact_event.object_id,
        record_contact_event.object_id_ref, record_contact_event.entity_type, record_contact_event.entity_id,
        record_contact_event.properties, record_contact_event.raw_payload, record_contact_event.webhook_event_id,
        record_contact_event.value, _currency, record_contact_event.external_event_id, _unique_event_id,
        record_contact_event.integration_id, _occurred_at, _received_at)
    ON CONFLICT DO NOTHING
    RETURNING id INTO _id;
    IF _id IS NULL THEN
        SELECT e.id INTO _id
        FROM public.contact_events e
        WHERE e.organization_id = _organization_id
            AND ((e.source = record_contact_event.source AND e.external_event_id = record_contact_event.external_event_id)
             OR e.unique_event_id = _unique_event_id)
        ORDER BY e.created_at
        LIMIT 1;
        RETURN _id;
    END IF;

    PERFORM public.emit_event_for(
        _organization_id, 'contact_event.recorded', 'contact', _contact_id,
        jsonb_build_object(
            'contact_event_id', _id,
            'contact_id', _contact_id,
            'contact_event_type', _event_type,
            'metric_name', _metric_name,
            'category', _category,
            'source_type', record_contact_event.source_type,
            'source', record_contact_event.source,
            'external_event_id', record_contact_event.external_event_id,
            'unique_event_id', _unique_event_id,
            'object_id', record_contact_event.object_id,
            'object_id_ref', record_contact_event.object_id_ref,
            'entity_type', record_contact_event.entity_type,
            'entity_id', record_contact_event.entity_id,
            'value', record_contact_event.value::text,
            'currency', _currency,
            'occurred_at', to_char(_occurred_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
            'received_at', to_char(_received_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
            'properties', record_contact_event.properties),
        record_contact_event.metadata);
    RETURN _id;
END
$$;

REVOKE ALL ON FUNCTION record_contact_event(uuid, text, text, text, text, text, text, text, text, text, text, numeric, text,
    timestamptz, timestamptz, jsonb, jsonb, uuid, uuid, uuid, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION record_contact_event(uuid, text, text, text, text, text, text, text, text, text, text, numeric,
    text, timestamptz, timestamptz, jsonb, jsonb, uuid, uuid, uuid, jsonb)
    TO afluente_app, afluente_worker, afluente_admin;
