-- What bounds the calls of external workers, for all members of a group and over their restarts: before, a rate was kept
-- by nobody, a destination that was down burnt the attempts of everything that waited for it, and a call whose process
-- died was made again blindly.

-- One row for each bucket of a worker's rate; consumers/runtime/rates.py says what the two moments mean.
CREATE TABLE worker_rate (
    worker          text NOT NULL,
    organization_id uuid NOT NULL,
    bucket          text NOT NULL,  -- the key, for rates of each key; else ''
    next_at         timestamptz NOT NULL DEFAULT 'epoch',
    booked_at       timestamptz NOT NULL DEFAULT 'epoch',
    PRIMARY KEY (worker, organization_id, bucket)
);
COMMENT ON TABLE worker_rate IS 'When the next call of a rate may be made, and where the line of those that wait for it ends.';
SELECT tenancy.protect('worker_rate');
GRANT SELECT ON worker_rate TO afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_rate TO afluente_worker;

-- One row for each destination that has failed; consumers/runtime/breakers.py says what they mean. Destinations are shared
-- by organizations, and may name what belongs to one: only workers and who looks after them see them.
CREATE TABLE worker_breaker (
    worker       text NOT NULL,
    destination  text NOT NULL,
    failures     integer NOT NULL DEFAULT 0 CHECK (failures >= 0),
    opened_count integer NOT NULL DEFAULT 0 CHECK (opened_count >= 0),
    open_until   timestamptz,  -- NULL: closed; in the past: the next delivery is the probe
    probe_by     uuid,  -- the process that makes the probe
    probe_until  timestamptz,
    error_class  text,
    last_error   text,
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (worker, destination),
    CHECK (open_until IS NULL OR opened_count > 0),
    CHECK ((probe_by IS NULL) = (probe_until IS NULL))
);
COMMENT ON TABLE worker_breaker IS 'Destinations of external workers that fail, or are left alone since they did.';
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_breaker TO afluente_worker;

-- The moment that the call of a waiting delivery was given: it asks for no other while that is not over.
ALTER TABLE event_delivery ADD COLUMN rate_at timestamptz;
-- The life (generation) of the delivery in which a call of it may have been made, and nobody recorded what came of it.
ALTER TABLE event_delivery ADD COLUMN unknown_generation integer;
