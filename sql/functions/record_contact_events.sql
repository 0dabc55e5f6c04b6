-- needs: 0020
-- record_contact_event for many at once, set by set: one insert of the facts, one of their events, in the caller's
-- transaction and the session's organization. `events` is an array of objects with the fields of
-- afluente.contact_event_item; those of one call may be a few thousand.
--
-- The contact is named by contact_id, or by phone (E.164 with the ninth digit), email (lower case) or contact_external_id
-- (an id at contact_source, else at source), in this order. With `create_contacts` a person nobody knows becomes a contact,
-- which emits contact.created and records "Contact Created"; and a known one is known by the other names from then on, so
-- that the next fact that has only those is about the same contact.
--
-- One row for each event, `n` as given: outcome `recorded`, or `duplicate` (contact_event_id is the one that names the fact
-- already, be it of this very call), or `rejected` with a reason: no_contact, unknown_contact, no_type (neither contact event
-- type nor metric), too_large. Whatever breaks a limit of the table, or cannot be read as its type, fails the whole call.
-- SQLSTATE: AF001 no organization, AF002 another one than the session's.
CREATE OR REPLACE FUNCTION record_contact_events(
    events          json,
    create_contacts boolean DEFAULT false,
    organization_id uuid DEFAULT NULL,
    metadata        jsonb DEFAULT '{}'
)
RETURNS TABLE (n integer, contact_event_id uuid, outcome text, reason text, contact_created boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF record_contact_events.organization_id <> auth.organization_id() THEN
        RAISE EXCEPTION 'organization % is not the one of this session', record_contact_events.organization_id
            USING ERRCODE = 'AF002';
    END IF;
    RETURN QUERY
    SELECT r.*
      FROM afluente.record_contact_event_items(
          ARRAY(SELECT i FROM json_populate_recordset(NULL::afluente.contact_event_item, events) i),
          create_contacts, metadata) r;
END
$$;
REVOKE ALL ON FUNCTION record_contact_events(json, boolean, uuid, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION record_contact_events(json, boolean, uuid, jsonb)
    TO afluente_app, afluente_worker, afluente_admin;
