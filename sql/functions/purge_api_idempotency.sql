-- needs: 0018
-- Forgets what requests with an Idempotency-Key were answered, once it is older than `keep`; returns how many.
CREATE OR REPLACE FUNCTION afluente.purge_api_idempotency(keep interval DEFAULT '30 days') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _purged bigint;
BEGIN
    DELETE FROM public.api_idempotency i WHERE i.created_at < clock_timestamp() - purge_api_idempotency.keep;
    GET DIAGNOSTICS _purged = ROW_COUNT;
    RETURN _purged;
END;
$$;
REVOKE ALL ON FUNCTION afluente.purge_api_idempotency(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.purge_api_idempotency(interval) TO afluente_worker;
