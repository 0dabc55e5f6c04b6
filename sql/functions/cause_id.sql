-- needs: 0016
-- What commands and pages call a cause: the version of the rule, and a digest of what the letters of a cause have in common.
CREATE OR REPLACE FUNCTION afluente.cause_id(worker text, event_type text, error_class text, pattern text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'c1-' || substr(encode(sha256(convert_to(
        concat_ws(E'\n', cause_id.worker, COALESCE(cause_id.event_type, ''), COALESCE(cause_id.error_class, ''),
                  COALESCE(cause_id.pattern, '')), 'UTF8')), 'hex'), 1, 12)
$$;
REVOKE ALL ON FUNCTION afluente.cause_id(text, text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.cause_id(text, text, text, text) TO afluente_worker, afluente_admin;
