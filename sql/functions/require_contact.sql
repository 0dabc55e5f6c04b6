-- needs: 0005
-- The contact that what is written for `contact_id` belongs to (afluente.surviving_contact), or an error: AF001 without an
-- organization, AF010 when it is not one of its contacts.
CREATE OR REPLACE FUNCTION afluente.require_contact(organization_id uuid, contact_id uuid) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _contact_id uuid;
BEGIN
    IF require_contact.organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: contacts belong to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction (workers: act for the organization of the event).';
    END IF;
    _contact_id := afluente.surviving_contact(require_contact.organization_id, require_contact.contact_id);
    IF _contact_id IS NULL THEN
        RAISE EXCEPTION 'contact % is not one of organization %', require_contact.contact_id, require_contact.organization_id
            USING ERRCODE = 'AF010', HINT = 'Pass a contact of the organization that the event belongs to.';
    END IF;
    RETURN _contact_id;
END
$$;
REVOKE ALL ON FUNCTION afluente.require_contact(uuid, uuid) FROM PUBLIC;
