-- The highest seq of a sealed month: a lane leaves the month alone only when its t1 has passed it, too. Transaction ids
-- alone do not say it, because after a crash they are given out again.
ALTER TABLE event_log_seal ADD COLUMN last_seq bigint;
COMMENT ON COLUMN event_log_seal.last_seq IS 'Highest seq in the month when it was sealed; 0 when it is empty.';
