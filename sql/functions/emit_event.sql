-- needs: 0003
-- Writes an event of the session's organization in the caller's transaction and returns its id. `organization_id` may be
-- left out; another one than the session's is refused. A `deliver_at` to come keeps the event in deferred_event till then.
-- With metadata.idempotency_key, the same key and payload give the first event's id, and another payload is an error.
-- SQLSTATE: AF001 no organization, AF002 foreign organization, AF003 bad event_type or entity_kind, AF004 bad payload or
-- metadata, AF005 too large (payload 256 KiB, metadata 16 KiB), AF006 key reused, AF007 unknown organization.
CREATE OR REPLACE FUNCTION emit_event(
    event_type      text,
    entity_kind     text,
    entity_id       uuid,
    payload         jsonb DEFAULT '{}',
    metadata        jsonb DEFAULT '{}',
    organization_id uuid DEFAULT NULL,
    deliver_at      timestamptz DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'emit_event: no organization'
            USING ERRCODE = 'AF001', HINT = 'SET LOCAL app.organization_id, or use emit_event_for as afluente_worker.';
    END IF;
    IF emit_event.organization_id <> _organization_id THEN
        RAISE EXCEPTION 'emit_event: organization % is not the session''s', emit_event.organization_id
            USING ERRCODE = 'AF002', HINT = 'Leave organization_id out, or use emit_event_for as afluente_worker.';
    END IF;
    RETURN afluente.write_event(_organization_id, emit_event.event_type, emit_event.entity_kind, emit_event.entity_id,
                                emit_event.payload, emit_event.metadata, emit_event.deliver_at);
END;
$$;
REVOKE ALL ON FUNCTION emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz)
    TO afluente_app, afluente_worker, afluente_admin;
