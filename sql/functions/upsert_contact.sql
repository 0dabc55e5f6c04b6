-- needs: 0005
-- The contact that a set of identities names, made if there is none. Never two contacts for one identity, however many
-- deliveries of the same new person are handled at once.
--
-- identities: [{"kind": "phone"|"email"|"external", "source": "", "value": ..., "as_received": ...}], values already in
-- the form used for matching, the most telling first. When they name several contacts, the first one's wins, nothing is
-- merged and `conflict` is true: a merge is contact.merged, a decision of its own.
--
-- What is known already is never overwritten: name, phone and e-mail are filled where they are empty. No identity at
-- all: no row. Runs as its caller, under the caller's row-level security.
CREATE OR REPLACE FUNCTION upsert_contact(
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
    _phone text := (SELECT i ->> 'value' FROM jsonb_array_elements(upsert_contact.identities) i
                    WHERE i ->> 'kind' = 'phone' LIMIT 1);
    _email text := (SELECT i ->> 'value' FROM jsonb_array_elements(upsert_contact.identities) i
                    WHERE i ->> 'kind' = 'email' LIMIT 1);
BEGIN
    created := false;
    conflict := false;
    IF jsonb_array_length(upsert_contact.identities) = 0 THEN
        RETURN;
    END IF;

    -- Held to the end of the transaction, taken in one order: whoever brings one of these identities at the same time
    -- waits here, and then finds the contact.
    PERFORM pg_advisory_xact_lock(key)
    FROM (SELECT DISTINCT hashtextextended(upsert_contact.organization_id || ':' || (i ->> 'kind') || ':'
                                           || coalesce(i ->> 'source', '') || ':' || (i ->> 'value'), 0) AS key
          FROM jsonb_array_elements(upsert_contact.identities) i
          ORDER BY 1) locks;

    SELECT array_agg(DISTINCT ci.contact_id) INTO _found
    FROM jsonb_array_elements(upsert_contact.identities) i
    JOIN contact_identities ci
      ON ci.organization_id = upsert_contact.organization_id AND ci.kind = i ->> 'kind'
     AND ci.source = coalesce(i ->> 'source', '') AND ci.value = i ->> 'value';

    IF _found IS NULL THEN
        INSERT INTO contacts (organization_id, name, phone_e164, email, source)
        VALUES (upsert_contact.organization_id, left(upsert_contact.name, 255), _phone, _email, upsert_contact.source)
        RETURNING id INTO contact_id;
        created := true;
    ELSE
        SELECT ci.contact_id INTO contact_id
        FROM jsonb_array_elements(upsert_contact.identities) WITH ORDINALITY AS i (identity, place)
        JOIN contact_identities ci
          ON ci.organization_id = upsert_contact.organization_id AND ci.kind = i.identity ->> 'kind'
         AND ci.source = coalesce(i.identity ->> 'source', '') AND ci.value = i.identity ->> 'value'
        ORDER BY i.place
        LIMIT 1;
        conflict := cardinality(_found) > 1;
        UPDATE contacts c
        SET name = coalesce(c.name, left(upsert_contact.name, 255)),
            phone_e164 = coalesce(c.phone_e164, _phone),
            email = coalesce(c.email, _email),
            updated_at = clock_timestamp()
        WHERE c.organization_id = upsert_contact.organization_id AND c.id = upsert_contact.contact_id
          AND c.anonymized_at IS NULL
          AND ((c.name IS NULL AND upsert_contact.name IS NOT NULL)
               OR (c.phone_e164 IS NULL AND _phone IS NOT NULL AND NOT conflict)
               OR (c.email IS NULL AND _email IS NOT NULL AND NOT conflict));
    END IF;

    INSERT INTO contact_identities (organization_id, kind, source, value, contact_id, as_received)
    SELECT upsert_contact.organization_id, i ->> 'kind', coalesce(i ->> 'source', ''), i ->> 'value',
           upsert_contact.contact_id, left(i ->> 'as_received', 320)
    FROM jsonb_array_elements(upsert_contact.identities) i
    ON CONFLICT DO NOTHING;
END
$$;
REVOKE ALL ON FUNCTION upsert_contact(uuid, jsonb, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION upsert_contact(uuid, jsonb, text, text) TO afluente_app, afluente_worker, afluente_admin;
