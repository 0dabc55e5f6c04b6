ALTER TABLE event_delivery DROP COLUMN unknown_generation;
ALTER TABLE event_delivery DROP COLUMN rate_at;
DROP TABLE worker_breaker;
DROP TABLE worker_rate;
