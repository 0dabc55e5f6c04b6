-- An organization whose surplus is ahead of all others in a partition: its records from an offset on are passed over and
-- read again at its own pace, so that nobody waits behind them. They stay where they are; this row is what makes it safe
-- to commit the group's offset beyond them.
CREATE TABLE worker_parked (
    worker          text NOT NULL,
    topic           text NOT NULL,
    partition       integer NOT NULL CHECK (partition >= 0),
    organization_id uuid NOT NULL,
    from_offset     bigint NOT NULL CHECK (from_offset >= 0),  -- everything of it before this is finished, or in hand
    passed_over     bigint NOT NULL DEFAULT 0 CHECK (passed_over >= 0),  -- of its records so many wait, about
    process         uuid NOT NULL,  -- only who set it moves it
    parked_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (worker, topic, partition, organization_id)
);
COMMENT ON TABLE worker_parked IS 'Organizations that workers have parked on a partition, and from which offset on.';
SELECT tenancy.protect('worker_parked');
GRANT SELECT ON worker_parked TO afluente_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON worker_parked TO afluente_worker;
