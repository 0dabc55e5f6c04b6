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
    _id              uuid := uuidv7();
BEGIN
    -- What nearly every event is: one condition, one statement. Postgres sets every expression up again in every
    -- transaction, and another function too: through write_event a transaction costs 5 to 9% more CPU. Whatever does not
    -- meet the condition is judged by write_event, which has the words for it; the limits are the ones there.
    IF emit_event.deliver_at IS NULL
       AND (emit_event.organization_id <> _organization_id) IS NOT TRUE
       AND emit_event.event_type ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' AND length(emit_event.event_type) <= 100
       AND emit_event.entity_kind ~ '^[a-z][a-z0-9_]*$' AND length(emit_event.entity_kind) <= 100
       AND jsonb_typeof(emit_event.payload) = 'object' AND jsonb_typeof(emit_event.metadata) = 'object'
       AND octet_length(emit_event.payload::text) <= 262144 AND octet_length(emit_event.metadata::text) <= 16384
       AND NOT jsonb_path_exists(emit_event.payload, 'strict $.**{201}')
       AND NOT emit_event.metadata ?| '{idempotency_key,schema_version}'
       AND (length(emit_event.metadata ->> 'request_id') > 255 OR length(emit_event.metadata ->> 'trace_id') > 255
            OR length(emit_event.metadata ->> 'actor_id') > 255
            OR length(emit_event.metadata ->> 'source') > 100) IS NOT TRUE
       AND current_setting('synchronous_commit') NOT IN ('off', 'local', 'remote_write')
    THEN
        INSERT INTO public.event_log
               (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at)
        SELECT _id, o.id, emit_event.event_type, emit_event.entity_kind, emit_event.entity_id, emit_event.payload,
               emit_event.metadata || jsonb_build_object('emitted_at', extract(epoch FROM clock_timestamp())),
               greatest(clock_timestamp(),
                        (SELECT max(s.ends_at) FROM public.event_log_seal s WHERE s.sealed_at IS NOT NULL))
          FROM public.organizations o
         WHERE o.id = _organization_id;
        IF FOUND THEN
            RETURN _id;
        END IF;
    END IF;
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
