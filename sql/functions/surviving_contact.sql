-- needs: 0005
-- The contact that what is written for `contact_id` belongs to: itself, or the one it was merged into. Null when the
-- organization has no such contact.
--
-- It is held against a merge to the end of the transaction: a merge that is under way is waited for and followed, one that
-- comes later waits, and then moves what the caller wrote. Without this a row could be written for a contact that has
-- just been merged away, and stay there.
CREATE OR REPLACE FUNCTION afluente.surviving_contact(organization_id uuid, contact_id uuid) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _contact_id  uuid := surviving_contact.contact_id;
    _merged_into uuid;
BEGIN
    LOOP
        -- The lock that a foreign key takes: it stops a merge (FOR UPDATE), and nothing else.
        SELECT c.merged_into INTO _merged_into
          FROM public.contacts c
         WHERE c.organization_id = surviving_contact.organization_id
           AND c.id = _contact_id
           FOR KEY SHARE;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        IF _merged_into IS NULL THEN
            RETURN _contact_id;
        END IF;
        _contact_id := _merged_into;
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION afluente.surviving_contact(uuid, uuid) FROM PUBLIC;
