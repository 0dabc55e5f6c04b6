DROP FUNCTION afluente.purge_api_idempotency(interval), afluente.take_api_tokens(uuid, uuid, numeric, integer, double precision, integer);
DROP TABLE api_idempotency, api_key_bucket;
DROP INDEX api_keys_prefix;
ALTER TABLE api_keys
    DROP CONSTRAINT api_keys_scopes,
    DROP CONSTRAINT api_keys_rotated_from,
    DROP COLUMN rotated_from,
    DROP COLUMN rate_burst,
    DROP COLUMN rate_per_s;
REVOKE ALL ON api_keys FROM afluente_app, afluente_admin, afluente_worker;
REVOKE ALL (id, organization_id, name, prefix, scopes, created_by, created_at, last_used_at, expires_at, revoked_at)
    ON api_keys FROM afluente_app, afluente_admin, afluente_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON api_keys TO afluente_app, afluente_admin;
GRANT SELECT, UPDATE ON api_keys TO afluente_worker;
