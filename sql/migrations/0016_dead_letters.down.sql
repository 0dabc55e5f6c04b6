DROP FUNCTION afluente.cause_id(text, text, text, text);
DROP FUNCTION afluente.error_pattern(text);
DROP TABLE undecodable_audit;
ALTER TABLE event_delivery DROP COLUMN edited_sha256;
