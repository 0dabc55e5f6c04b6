-- needs: 0020
-- A contact made by hand or by a service, in the caller's transaction and the session's organization: emits contact.created
-- and records "Contact Created", once. Identities as for upsert_contact: one that is known already gives its contact, and
-- `created` is false; none at all makes a contact that only its name tells.
-- SQLSTATE: AF001 no organization.
CREATE OR REPLACE FUNCTION create_contact(
    name            text,
    identities      jsonb DEFAULT '[]',
    source          text DEFAULT 'crm',
    metadata        jsonb DEFAULT '{}',
    OUT contact_id  uuid,
    OUT created     boolean,
    OUT conflict    boolean
)
RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: contacts belong to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction.';
    END IF;
    IF create_contact.identities = '[]' THEN
        INSERT INTO public.contacts (organization_id, name, source)
        VALUES (_organization_id, left(create_contact.name, 255), create_contact.source)
        RETURNING id INTO contact_id;
        created := true;
        conflict := false;
    ELSE
        SELECT u.contact_id, u.created, u.conflict INTO contact_id, created, conflict
          FROM public.upsert_contact(_organization_id, create_contact.identities, create_contact.name,
                                     create_contact.source) u;
    END IF;
    IF created THEN
        PERFORM public.emit_event('contact.created', 'contact', contact_id,
            jsonb_build_object(
                'phone', (SELECT i ->> 'value' FROM jsonb_array_elements(create_contact.identities) i
                           WHERE i ->> 'kind' = 'phone' LIMIT 1),
                'name', create_contact.name,
                'source', create_contact.source),
            create_contact.metadata);
        PERFORM public.record_contact_event(
            contact_id        => create_contact.contact_id,
            metric_name       => 'Contact Created',
            source            => create_contact.source,
            source_type       => 'INTERNAL',
            external_event_id => 'contact_created:' || create_contact.contact_id,
            entity_type       => 'contact',
            entity_id         => create_contact.contact_id::text,
            metadata          => create_contact.metadata);
    END IF;
END
$$;
REVOKE ALL ON FUNCTION create_contact(text, jsonb, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION create_contact(text, jsonb, text, jsonb) TO afluente_app, afluente_worker, afluente_admin;
