-- needs: 0020
-- Changes what is known of a contact (`changes`: name, phone, email; null empties), in the caller's transaction and the
-- session's organization, and records "Contact Updated" with the names of the fields that changed. Returns those names;
-- none: nothing is recorded. phone is E.164 with the ninth digit and email in lower case: the forms used for matching. A
-- new phone or e-mail becomes an identity of the contact, an old one stays one.
-- SQLSTATE: AF001 no organization, AF010 not a contact of it, AF021 anonymized, AF023 the phone or e-mail names another
-- contact: merge the two.
CREATE OR REPLACE FUNCTION update_contact(
    contact_id uuid,
    changes    jsonb,
    source     text DEFAULT 'crm',
    metadata   jsonb DEFAULT '{}'
)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    _organization_id uuid := auth.organization_id();
    _contact_id      uuid := afluente.require_contact(_organization_id, update_contact.contact_id);
    _before          public.contacts;
    _fields          text[];
    _identity        record;
    _owner           uuid;
BEGIN
    IF jsonb_typeof(changes) <> 'object' OR changes - '{name,phone,email}'::text[] <> '{}' THEN
        RAISE EXCEPTION 'changes of a contact are an object of name, phone and email' USING ERRCODE = 'AF004';
    END IF;
    PERFORM pg_advisory_xact_lock(l.key)
       FROM (SELECT afluente.identity_lock(_organization_id, i.key, '', i.value) AS key
               FROM jsonb_each_text(changes) i
              WHERE i.key IN ('phone', 'email') AND i.value IS NOT NULL
              ORDER BY 1) l;
    SELECT * INTO _before
      FROM public.contacts c
     WHERE c.organization_id = _organization_id AND c.id = _contact_id
       FOR NO KEY UPDATE;
    IF _before.anonymized_at IS NOT NULL THEN
        RAISE EXCEPTION 'contact % is anonymized', _contact_id USING ERRCODE = 'AF021',
            HINT = 'Who was erased stays erased.';
    END IF;
    SELECT array_agg(n.key ORDER BY n.key) INTO _fields
      FROM jsonb_each_text(changes) n
      JOIN (VALUES ('name', _before.name), ('phone', _before.phone_e164), ('email', _before.email)) o (key, value)
        ON o.key = n.key AND o.value IS DISTINCT FROM n.value;
    IF _fields IS NULL THEN
        RETURN '{}';
    END IF;
    FOR _identity IN
        SELECT i.key AS kind, i.value FROM jsonb_each_text(changes) i
         WHERE i.key IN ('phone', 'email') AND i.key = ANY (_fields) AND i.value IS NOT NULL
    LOOP
        INSERT INTO public.contact_identities AS known (organization_id, kind, source, value, contact_id)
        VALUES (_organization_id, _identity.kind, '', _identity.value, _contact_id)
        ON CONFLICT (organization_id, kind, source, value) DO UPDATE SET as_received = known.as_received
        RETURNING known.contact_id INTO _owner;
        IF _owner <> _contact_id THEN
            RAISE EXCEPTION 'the % names contact %', _identity.kind, _owner USING ERRCODE = 'AF023',
                HINT = format('If they are one person: afluente contact merge %s --into %s', _owner, _contact_id);
        END IF;
    END LOOP;
    UPDATE public.contacts c
       SET name = CASE WHEN changes ? 'name' THEN changes ->> 'name' ELSE c.name END,
           phone_e164 = CASE WHEN changes ? 'phone' THEN changes ->> 'phone' ELSE c.phone_e164 END,
           email = CASE WHEN changes ? 'email' THEN changes ->> 'email' ELSE c.email END,
           updated_at = clock_timestamp()
     WHERE c.organization_id = _organization_id AND c.id = _contact_id;
    -- The names of what changed, not what it is: events are read more widely than contacts.
    PERFORM public.record_contact_event(
        contact_id  => _contact_id,
        metric_name => 'Contact Updated',
        source      => update_contact.source,
        source_type => 'INTERNAL',
        entity_type => 'contact',
        entity_id   => _contact_id::text,
        properties  => jsonb_build_object('fields', _fields),
        metadata    => update_contact.metadata);
    RETURN _fields;
END
$$;
REVOKE ALL ON FUNCTION update_contact(uuid, jsonb, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION update_contact(uuid, jsonb, text, jsonb) TO afluente_app, afluente_worker, afluente_admin;
