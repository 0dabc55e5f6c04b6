-- needs: 0003
-- What producers.emit calls: for workers emit_event_for when an organization is given, for everybody else emit_event. In
-- one statement, since a client cannot know which role its session has at the moment.
CREATE OR REPLACE FUNCTION afluente.emit_as_allowed(
    event_type      text,
    entity_kind     text,
    entity_id       uuid,
    payload         jsonb,
    metadata        jsonb,
    organization_id uuid,
    deliver_at      timestamptz
) RETURNS uuid
LANGUAGE plpgsql
AS $$
BEGIN
    IF emit_as_allowed.organization_id IS NOT NULL AND pg_has_role(current_user, 'afluente_worker', 'USAGE') THEN
        RETURN public.emit_event_for(emit_as_allowed.organization_id, emit_as_allowed.event_type,
                                     emit_as_allowed.entity_kind, emit_as_allowed.entity_id, emit_as_allowed.payload,
                                     emit_as_allowed.metadata, emit_as_allowed.deliver_at);
    END IF;
    RETURN public.emit_event(emit_as_allowed.event_type, emit_as_allowed.entity_kind, emit_as_allowed.entity_id,
                             emit_as_allowed.payload, emit_as_allowed.metadata, emit_as_allowed.organization_id,
                             emit_as_allowed.deliver_at);
END;
$$;
REVOKE ALL ON FUNCTION afluente.emit_as_allowed(text, text, uuid, jsonb, jsonb, uuid, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.emit_as_allowed(text, text, uuid, jsonb, jsonb, uuid, timestamptz)
    TO afluente_app, afluente_worker, afluente_admin;
