-- What people tell a worker: to pause and to resume. One row for each pause, kept: who, when, why, and who ended it.
CREATE TABLE worker_control (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker      text NOT NULL,
    paused_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_by   text NOT NULL,
    reason      text NOT NULL DEFAULT '',
    resumed_at  timestamptz,  -- NULL: paused
    resumed_by  text,
    CHECK ((resumed_at IS NULL) = (resumed_by IS NULL))
);
COMMENT ON TABLE worker_control IS 'Every pause of a worker. While one is not ended, no process of that worker begins a delivery.';
-- At most one pause at a time; serves the look that each process takes every second.
CREATE UNIQUE INDEX worker_control_paused ON worker_control (worker) WHERE resumed_at IS NULL;
GRANT SELECT ON worker_control TO afluente_admin;
GRANT SELECT, INSERT ON worker_control TO afluente_worker;
GRANT UPDATE (resumed_at, resumed_by) ON worker_control TO afluente_worker;

-- When each worker's periodic hook last ran. The row is written in the transaction of what the hook does, so that of all
-- members one runs it, once for each interval, restarts included.
CREATE TABLE worker_periodic (
    worker       text PRIMARY KEY,
    last_run_at  timestamptz NOT NULL,
    last_run_by  uuid NOT NULL  -- worker_process.id
);
COMMENT ON TABLE worker_periodic IS 'The last run of each worker''s periodic hook, committed together with its effects.';
GRANT SELECT ON worker_periodic TO afluente_admin;
GRANT SELECT, INSERT, UPDATE ON worker_periodic TO afluente_worker;
