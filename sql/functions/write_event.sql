-- needs: 0003
-- The body of emit_event and emit_event_for, which have settled whose event it is. Few statements: this runs in every
-- business transaction. No NOTIFY: it serialises the commits of all writers.
CREATE OR REPLACE FUNCTION afluente.write_event(
    organization_id uuid,
    event_type      text,
    entity_kind     text,
    entity_id       uuid,
    payload         jsonb,
    metadata        jsonb,
    deliver_at      timestamptz
) RETURNS uuid
LANGUAGE plpgsql
AS $$
DECLARE
    _id       uuid := uuidv7();
    _payload  jsonb := COALESCE(write_event.payload, '{}');
    _metadata jsonb := COALESCE(write_event.metadata, '{}');
    _text     text := _payload::text;
    _key      text;
    _hash     bytea;
    _first    record;
BEGIN
    IF write_event.event_type !~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' IS NOT FALSE OR length(write_event.event_type) > 100 THEN
        RAISE EXCEPTION 'event_type % is not {entity}.{action} in lower snake case of at most 100 characters',
            COALESCE(quote_literal(left(write_event.event_type, 120)), 'NULL')
            USING ERRCODE = 'AF003', HINT = 'For example: lead.stage_changed';
    END IF;
    IF write_event.entity_kind !~ '^[a-z][a-z0-9_]*$' IS NOT FALSE OR length(write_event.entity_kind) > 100 THEN
        RAISE EXCEPTION 'entity_kind % is not lower snake case of at most 100 characters',
            COALESCE(quote_literal(left(write_event.entity_kind, 120)), 'NULL')
            USING ERRCODE = 'AF003', HINT = 'For example: lead';
    END IF;
    IF jsonb_typeof(_payload) <> 'object' OR jsonb_typeof(_metadata) <> 'object' THEN
        RAISE EXCEPTION 'payload and metadata must be JSON objects; got payload % and metadata %',
            jsonb_typeof(_payload), jsonb_typeof(_metadata)
            USING ERRCODE = 'AF004', HINT = 'Wrap a list or a value in an object: {"items": [...]}';
    END IF;
    IF octet_length(_text) > 262144 THEN
        RAISE EXCEPTION 'payload has % bytes of JSON text; the limit is 262144', octet_length(_text)
            USING ERRCODE = 'AF005', HINT = 'Store the content elsewhere and put its id into the payload.';
    END IF;
    -- Whoever reads or writes JSON recursively stops at some depth (orjson at 254). 200 levels need 400 characters.
    IF octet_length(_text) > 400 AND jsonb_path_exists(_payload, 'strict $.**{201}') THEN
        RAISE EXCEPTION 'payload is nested deeper than 200 levels'
            USING ERRCODE = 'AF004', HINT = 'Flatten it, or put the structure into a text field.';
    END IF;
    IF _metadata <> '{}' THEN
        IF octet_length(_metadata::text) > 16384 THEN
            RAISE EXCEPTION 'metadata has % bytes of JSON text; the limit is 16384', octet_length(_metadata::text)
                USING ERRCODE = 'AF005', HINT = 'Metadata is for correlation; content belongs in the payload.';
        END IF;
        _key := _metadata ->> 'idempotency_key';
        IF length(_key) NOT BETWEEN 1 AND 255
           OR length(_metadata ->> 'request_id') > 255 OR length(_metadata ->> 'trace_id') > 255
           OR length(_metadata ->> 'actor_id') > 255 OR length(_metadata ->> 'source') > 100
        THEN
            RAISE EXCEPTION 'metadata has a value out of its limits: idempotency_key 1-255, request_id, trace_id and actor_id 255, source 100 characters'
                USING ERRCODE = 'AF004', HINT = 'Use the sender''s id or a hash of it.';
        END IF;
        IF _metadata ->> 'schema_version' !~ '^[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$' THEN
            RAISE EXCEPTION 'metadata.schema_version % is not a semantic version', _metadata -> 'schema_version'
                USING ERRCODE = 'AF004', HINT = 'For example: "1.0.0". Leave it out for the current version.';
        END IF;
    END IF;

    -- A lost commit of an event is a lost event: the relay may have published it, or its writer been told it is done.
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;

    IF _key IS NOT NULL THEN
        _hash := sha256(convert_to(concat_ws(E'\n', write_event.event_type, write_event.entity_kind,
                                             COALESCE(write_event.entity_id::text, ''), _text), 'UTF8'));
        LOOP
            -- Waits for a transaction that holds the key: it commits, and its event is the one; or not, and ours is.
            INSERT INTO public.event_idempotency (organization_id, key, event_id, payload_hash)
            SELECT o.id, _key, _id, _hash
              FROM public.organizations o
             WHERE o.id = write_event.organization_id
                ON CONFLICT ON CONSTRAINT event_idempotency_pkey DO NOTHING;
            EXIT WHEN FOUND;
            SELECT i.event_id, i.payload_hash INTO _first
              FROM public.event_idempotency i
             WHERE i.organization_id = write_event.organization_id AND i.key = _key;
            IF FOUND THEN
                IF _first.payload_hash <> _hash THEN
                    RAISE EXCEPTION 'idempotency key % was used for another event or payload (event %)',
                        quote_literal(_key), _first.event_id
                        USING ERRCODE = 'AF006', HINT = 'A key names one fact: give this one its own.';
                END IF;
                RETURN _first.event_id;
            END IF;
            -- Neither inserted nor there: the organization does not exist, or the key was purged in between.
            EXIT WHEN NOT EXISTS (SELECT FROM public.organizations o WHERE o.id = write_event.organization_id);
        END LOOP;
    END IF;

    _metadata := _metadata || jsonb_build_object('emitted_at', extract(epoch FROM clock_timestamp()));

    IF write_event.deliver_at > clock_timestamp() THEN
        INSERT INTO public.deferred_event
               (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, deliver_at)
        SELECT _id, o.id, write_event.event_type, write_event.entity_kind, write_event.entity_id, _payload, _metadata,
               write_event.deliver_at
          FROM public.organizations o
         WHERE o.id = write_event.organization_id;
    ELSE
        INSERT INTO public.event_log
               (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at)
        SELECT _id, o.id, write_event.event_type, write_event.entity_kind, write_event.entity_id, _payload, _metadata,
               greatest(clock_timestamp(),
                        (SELECT max(s.ends_at) FROM public.event_log_seal s WHERE s.sealed_at IS NOT NULL))
          FROM public.organizations o
         WHERE o.id = write_event.organization_id;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'organization % does not exist', write_event.organization_id
            USING ERRCODE = 'AF007', HINT = 'Commit the organization before its first event, or check the id.';
    END IF;
    RETURN _id;
END;
$$;
REVOKE ALL ON FUNCTION afluente.write_event(uuid, text, text, uuid, jsonb, jsonb, timestamptz) FROM PUBLIC;
