-- needs: 0005
-- The key of the advisory lock of one identity of an organization: upsert_contact and merge_contacts take it.
CREATE OR REPLACE FUNCTION afluente.identity_lock(organization_id uuid, kind text, source text, value text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashtextextended(identity_lock.organization_id || ':' || identity_lock.kind || ':'
                            || coalesce(identity_lock.source, '') || ':' || identity_lock.value, 0)
$$;
REVOKE ALL ON FUNCTION afluente.identity_lock(uuid, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.identity_lock(uuid, text, text, text) TO afluente_app, afluente_worker, afluente_admin;
