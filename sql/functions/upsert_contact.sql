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
BEGIN
    created := false;
    conflict := false;
    IF jsonb_array_length(upsert_contact.identities) = 0 THEN
        RETURN;
    END IF;

    -- Held to the end of the transaction, taken in one order: whoever brings one of these identities at the same time
    -- waits here, and then finds the contact. A merge of the contact takes the locks of all its identities.
    PERFORM pg_advisory_xact_lock(key)
    FROM (SELECT DISTINCT afluente.identity_lock(upsert_contact.organization_id, i ->> 'kind', i ->> 'source',
                                                 i ->> 'value') AS key
          FROM jsonb_array_elements(upsert_contact.identities) i
          ORDER BY 1) locks;

    SELECT f.contact_id, f.created, f.conflict INTO contact_id, created, conflict
    FROM afluente.find_or_make_contact(upsert_contact.organization_id, upsert_contact.identities, upsert_contact.name,
                                       upsert_contact.source) f;
END
$$;
REVOKE ALL ON FUNCTION upsert_contact(uuid, jsonb, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION upsert_contact(uuid, jsonb, text, text) TO afluente_app, afluente_worker, afluente_admin;
