-- needs: 0003
-- Takes back an organization's event that still waits for its deliver_at; false when it is not there: released already,
-- cancelled already, or another organization's. Its idempotency key is free again.
CREATE OR REPLACE FUNCTION cancel_deferred_for(organization_id uuid, id uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM public.deferred_event d
     WHERE d.id = cancel_deferred_for.id
       AND d.organization_id = cancel_deferred_for.organization_id;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM public.event_idempotency i
     WHERE i.organization_id = cancel_deferred_for.organization_id
       AND i.event_id = cancel_deferred_for.id;
    RETURN true;
END;
$$;
REVOKE ALL ON FUNCTION cancel_deferred_for(uuid, uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION cancel_deferred_for(uuid, uuid) TO afluente_worker;
