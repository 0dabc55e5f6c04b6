-- needs: 0003
-- emit_event for any organization: workers only, never granted to applications.
CREATE OR REPLACE FUNCTION emit_event_for(
    organization_id uuid,
    event_type      text,
    entity_kind     text,
    entity_id       uuid,
    payload         jsonb DEFAULT '{}',
    metadata        jsonb DEFAULT '{}',
    deliver_at      timestamptz DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF emit_event_for.organization_id IS NULL THEN
        RAISE EXCEPTION 'emit_event_for: no organization'
            USING ERRCODE = 'AF001', HINT = 'Give the organization_id of the row that changed.';
    END IF;
    RETURN afluente.write_event(emit_event_for.organization_id, emit_event_for.event_type, emit_event_for.entity_kind,
                                emit_event_for.entity_id, emit_event_for.payload, emit_event_for.metadata,
                                emit_event_for.deliver_at);
END;
$$;
REVOKE ALL ON FUNCTION emit_event_for(uuid, text, text, uuid, jsonb, jsonb, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION emit_event_for(uuid, text, text, uuid, jsonb, jsonb, timestamptz) TO afluente_worker;
