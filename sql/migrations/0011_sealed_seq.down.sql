DROP FUNCTION afluente.seal_event_log(pg_snapshot, bigint);
ALTER TABLE event_log_seal DROP COLUMN last_seq;
