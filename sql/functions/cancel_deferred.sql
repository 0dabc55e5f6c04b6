-- needs: 0003
-- cancel_deferred_for of the session's organization.
CREATE OR REPLACE FUNCTION cancel_deferred(id uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'cancel_deferred: no organization'
            USING ERRCODE = 'AF001', HINT = 'SET LOCAL app.organization_id, or use cancel_deferred_for as afluente_worker.';
    END IF;
    RETURN public.cancel_deferred_for(_organization_id, cancel_deferred.id);
END;
$$;
REVOKE ALL ON FUNCTION cancel_deferred(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION cancel_deferred(uuid) TO afluente_app, afluente_worker, afluente_admin;
