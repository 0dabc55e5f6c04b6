-- The roles stay: they belong to the cluster, and another of its databases may be using them, or be about to.
-- Where nothing does, by hand: DROP ROLE afluente_app, afluente_worker, afluente_admin.
REVOKE ALL ON SCHEMA public, auth, afluente FROM afluente_app, afluente_worker, afluente_admin;
DROP FUNCTION auth.organization_id();
DROP SCHEMA afluente CASCADE;
DROP SCHEMA tenancy CASCADE;
DO $$
BEGIN
    DROP SCHEMA auth;
EXCEPTION
    WHEN dependent_objects_still_exist OR insufficient_privilege THEN
        NULL;  -- Supabase's own: it was there before us
END;
$$;
