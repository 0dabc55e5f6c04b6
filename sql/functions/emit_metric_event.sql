-- needs: 0006
-- The metrics seed's emitEvent: records a fact by its metric. Everything record_contact_event promises holds here.
-- source_id is the fact's name at its source, '<fact>:<source id>': without one the fact has no name, and two calls are
-- two facts.
CREATE OR REPLACE FUNCTION emit_metric_event(
    contact_id      uuid,
    metric_name     text,
    properties      jsonb DEFAULT '{}',
    value           numeric DEFAULT NULL,
    currency        text DEFAULT 'BRL',
    source          text DEFAULT NULL,
    source_id       text DEFAULT NULL,
    integration_id  uuid DEFAULT NULL,
    entity_type     text DEFAULT NULL,
    entity_id       text DEFAULT NULL,
    occurred_at     timestamptz DEFAULT NULL,
    source_type     text DEFAULT 'INTERNAL',
    organization_id uuid DEFAULT NULL,
    metadata        jsonb DEFAULT '{}'
)
RETURNS uuid
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT public.record_contact_event(
        contact_id        => emit_metric_event.contact_id,
        metric_name       => emit_metric_event.metric_name,
        source            => emit_metric_event.source,
        source_type       => emit_metric_event.source_type,
        external_event_id => emit_metric_event.source_id,
        entity_type       => emit_metric_event.entity_type,
        entity_id         => emit_metric_event.entity_id,
        value             => emit_metric_event.value,
        currency          => emit_metric_event.currency,
        occurred_at       => emit_metric_event.occurred_at,
        properties        => emit_metric_event.properties,
        integration_id    => emit_metric_event.integration_id,
        organization_id   => emit_metric_event.organization_id,
        metadata          => emit_metric_event.metadata)
$$;
REVOKE ALL ON FUNCTION emit_metric_event(uuid, text, jsonb, numeric, text, text, text, uuid, text, text, timestamptz, text,
    uuid, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION emit_metric_event(uuid, text, jsonb, numeric, text, text, text, uuid, text, text, timestamptz,
    text, uuid, jsonb) TO afluente_app, afluente_worker, afluente_admin;
