-- What the REST API asks of its keys. Before: a key had no limit of its own and no successor, every application of an
-- organization could read its keys' hashes and write them, and nothing remembered what a request had been answered.

ALTER TABLE api_keys
    ADD COLUMN rate_per_s   numeric CHECK (rate_per_s BETWEEN 0.001 AND 100000),    -- NULL: the API's default
    ADD COLUMN rate_burst   integer CHECK (rate_burst BETWEEN 1 AND 1000000),
    ADD COLUMN rotated_from uuid,                                                   -- the key whose place this one takes
    ADD CONSTRAINT api_keys_rotated_from FOREIGN KEY (organization_id, rotated_from)
        REFERENCES api_keys (organization_id, id) ON DELETE SET NULL (rotated_from),
    ADD CONSTRAINT api_keys_scopes CHECK (
        array_position(scopes, NULL) IS NULL
        AND array_to_string(scopes, ' ') ~ '^([a-z]+(-[a-z]+)*:(read|write)( |$))*$');
-- A key is found by what is no secret of it, so that how long the search takes tells nothing about the rest.
CREATE UNIQUE INDEX api_keys_prefix ON api_keys (prefix);

-- A key is made, changed and revoked by operators; what a request may do with its own key is read it, without the hash.
REVOKE ALL ON api_keys FROM afluente_app, afluente_admin, afluente_worker;
GRANT SELECT (id, organization_id, name, prefix, scopes, created_by, created_at, last_used_at, expires_at, revoked_at,
              rate_per_s, rate_burst, rotated_from)
   ON api_keys TO afluente_app, afluente_admin;
GRANT INSERT, UPDATE (name, scopes, expires_at, revoked_at, rate_per_s, rate_burst) ON api_keys TO afluente_admin;
GRANT SELECT, UPDATE (last_used_at) ON api_keys TO afluente_worker;

-- What each key may still do: a bucket that all web processes take from, in slices. Unlogged: after a crash of the server
-- every bucket is full, which harms nobody.
CREATE UNLOGGED TABLE api_key_bucket (
    api_key_id      uuid PRIMARY KEY,
    organization_id uuid NOT NULL,
    tokens          double precision NOT NULL,
    filled_at       timestamptz NOT NULL,
    FOREIGN KEY (organization_id, api_key_id) REFERENCES api_keys (organization_id, id) ON DELETE CASCADE
) WITH (fillfactor = 50);  -- room for the next version on the same page
COMMENT ON TABLE api_key_bucket IS 'Tokens left of each API key''s rate, as of filled_at; below zero: a batch to be paid for.';
SELECT tenancy.protect('api_key_bucket');
GRANT SELECT, INSERT, UPDATE ON api_key_bucket TO afluente_worker;

-- What a request with an Idempotency-Key was answered, written in the transaction of what it did. A repeat waits for the
-- first one here, and is answered alike.
CREATE TABLE api_idempotency (
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    key             text NOT NULL CHECK (char_length(key) BETWEEN 1 AND 255),
    request_hash    bytea NOT NULL CHECK (octet_length(request_hash) = 32),
    status          smallint CHECK (status BETWEEN 200 AND 299),  -- NULL: its transaction is still open
    answer          jsonb,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, key)
);
CREATE INDEX api_idempotency_created ON api_idempotency (created_at);  -- afluente.purge_api_idempotency
SELECT tenancy.protect('api_idempotency');
GRANT SELECT, INSERT, UPDATE (status, answer) ON api_idempotency TO afluente_app;
GRANT SELECT ON api_idempotency TO afluente_admin;
GRANT SELECT, DELETE ON api_idempotency TO afluente_worker;
