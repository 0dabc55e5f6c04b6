ALTER TABLE event_delivery DROP COLUMN outcome_unknown;
ALTER TABLE event_delivery DROP COLUMN rate_at;
DROP TABLE worker_breaker;
DROP TABLE worker_rate;
