-- needs: 0005
-- The contact that a set of identities names, made if there is none. The body of upsert_contact, without its locks: never
-- two contacts for one identity either, because the primary key of contact_identities decides, but others may find and
-- change the contact before the caller commits.
CREATE OR REPLACE FUNCTION afluente.find_or_make_contact(
    organization_id uuid,
    identities      jsonb,
    name            text,
    source          text,
    OUT contact_id  uuid,
    OUT created     boolean,
    OUT conflict    boolean
)
RETURNS record
LANGUAGE plpgsql
SET search_path = pg_catalog, public
AS $$
DECLARE
    _found uuid[];
    _phone text := (SELECT i ->> 'value' FROM jsonb_array_elements(find_or_make_contact.identities) i
                    WHERE i ->> 'kind' = 'phone' LIMIT 1);
    _email text := (SELECT i ->> 'value' FROM jsonb_array_elements(find_or_make_contact.identities) i
                    WHERE i ->> 'kind' = 'email' LIMIT 1);
BEGIN
    LOOP
        created := false;
        conflict := false;
        SELECT array_agg(f.contact_id ORDER BY f.place) INTO _found
        FROM (SELECT ci.contact_id, min(i.place) AS place
              FROM jsonb_array_elements(find_or_make_contact.identities) WITH ORDINALITY AS i (identity, place)
             -- One look-up for each. As a join, a plan made when there were few reads all of the organization's identities.
             CROSS JOIN LATERAL (
                    SELECT ci.contact_id
                      FROM contact_identities ci
                     WHERE ci.organization_id = find_or_make_contact.organization_id AND ci.kind = i.identity ->> 'kind'
                       AND ci.source = coalesce(i.identity ->> 'source', '') AND ci.value = i.identity ->> 'value'
                     LIMIT 1) ci
              GROUP BY ci.contact_id) f;

        IF _found IS NULL THEN
            INSERT INTO contacts (organization_id, name, phone_e164, email, source)
            VALUES (find_or_make_contact.organization_id, left(find_or_make_contact.name, 255), _phone, _email,
                  find_or_make_contact.source)
            RETURNING id INTO contact_id;
            created := true;
        ELSE
            contact_id := _found[1];
            conflict := cardinality(_found) > 1;
            UPDATE contacts c
            SET name = coalesce(c.name, left(find_or_make_contact.name, 255)),
                phone_e164 = CASE WHEN conflict THEN c.phone_e164 ELSE coalesce(c.phone_e164, _phone) END,
                email = CASE WHEN conflict THEN c.email ELSE coalesce(c.email, _email) END,
                updated_at = clock_timestamp()
            WHERE c.organization_id = find_or_make_contact.organization_id AND c.id = find_or_make_contact.contact_id
              AND c.anonymized_at IS NULL
              AND ((c.name IS NULL AND find_or_make_contact.name IS NOT NULL)
                   OR (c.phone_e164 IS NULL AND _phone IS NOT NULL AND NOT conflict)
                   OR (c.email IS NULL AND _email IS NOT NULL AND NOT conflict));
        END IF;

        INSERT INTO contact_identities (organization_id, kind, source, value, contact_id, as_received)
        SELECT find_or_make_contact.organization_id, i ->> 'kind', coalesce(i ->> 'source', ''), i ->> 'value',
               find_or_make_contact.contact_id, left(i ->> 'as_received', 320)
        FROM jsonb_array_elements(find_or_make_contact.identities) i
        ON CONFLICT DO NOTHING;

        -- Somebody who does not take the locks has just given one of these identities to a contact: that one is it, and
        -- the one made here would be its double.
        EXIT WHEN NOT created OR NOT EXISTS (
            SELECT FROM jsonb_array_elements(find_or_make_contact.identities) i
             CROSS JOIN LATERAL (
                    SELECT ci.contact_id
                      FROM contact_identities ci
                     WHERE ci.organization_id = find_or_make_contact.organization_id AND ci.kind = i ->> 'kind'
                       AND ci.source = coalesce(i ->> 'source', '') AND ci.value = i ->> 'value'
                     LIMIT 1) ci
             WHERE ci.contact_id <> find_or_make_contact.contact_id);
        DELETE FROM contacts c
        WHERE c.organization_id = find_or_make_contact.organization_id AND c.id = find_or_make_contact.contact_id;
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION afluente.find_or_make_contact(uuid, jsonb, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.find_or_make_contact(uuid, jsonb, text, text)
    TO afluente_app, afluente_worker, afluente_admin;
