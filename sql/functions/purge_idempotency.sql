-- needs: 0003
-- Forgets idempotency keys older than `keep`; returns how many. A sender that repeats itself later than that emits again.
CREATE OR REPLACE FUNCTION afluente.purge_idempotency(keep interval DEFAULT '30 days') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _purged bigint;
BEGIN
    DELETE FROM public.event_idempotency i
     WHERE i.created_at < clock_timestamp() - purge_idempotency.keep
       AND NOT EXISTS (SELECT FROM public.deferred_event d WHERE d.id = i.event_id);  -- not before its event is out
    GET DIAGNOSTICS _purged = ROW_COUNT;
    RETURN _purged;
END;
$$;
REVOKE ALL ON FUNCTION afluente.purge_idempotency(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.purge_idempotency(interval) TO afluente_worker;
