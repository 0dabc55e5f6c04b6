-- needs: 0018
-- Takes up to `wanted` tokens out of a key's bucket for one process, after `spent`: what the process gave out beyond its
-- last slice (below zero: what is left of it, given back). Returns how many were granted, perhaps none, and the level
-- that is left. A bucket never holds more than `burst`, and fills by `rate` a second.
--
-- Called several times a second at most for each key and process, so `last_used_at` is kept here, once a minute.
CREATE OR REPLACE FUNCTION afluente.take_api_tokens(
    organization_id uuid,
    api_key_id      uuid,
    rate            numeric,
    burst           integer,
    spent           double precision,
    wanted          integer,
    OUT granted     integer,
    OUT level       double precision
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _now    timestamptz := clock_timestamp();
    _bucket public.api_key_bucket;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);  -- nothing here is worth waiting for the disk
    INSERT INTO public.api_key_bucket (api_key_id, organization_id, tokens, filled_at)
    VALUES (take_api_tokens.api_key_id, take_api_tokens.organization_id, take_api_tokens.burst, _now)
        ON CONFLICT ON CONSTRAINT api_key_bucket_pkey DO NOTHING;
    SELECT b.* INTO STRICT _bucket
      FROM public.api_key_bucket b WHERE b.api_key_id = take_api_tokens.api_key_id FOR UPDATE;
    -- A clock that stepped back fills nothing.
    level := least(take_api_tokens.burst,
                   _bucket.tokens + greatest(0, extract(epoch FROM _now - _bucket.filled_at)) * take_api_tokens.rate
                       - take_api_tokens.spent);
    granted := greatest(0, least(take_api_tokens.wanted, floor(level)));
    level := level - granted;
    UPDATE public.api_key_bucket b
       SET tokens = take_api_tokens.level, filled_at = greatest(_now, _bucket.filled_at)
     WHERE b.api_key_id = take_api_tokens.api_key_id;
    UPDATE public.api_keys k
       SET last_used_at = _now
     WHERE k.id = take_api_tokens.api_key_id
       AND (k.last_used_at IS NULL OR k.last_used_at < _now - interval '1 minute');
END;
$$;
REVOKE ALL ON FUNCTION afluente.take_api_tokens(uuid, uuid, numeric, integer, double precision, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.take_api_tokens(uuid, uuid, numeric, integer, double precision, integer)
    TO afluente_worker;
