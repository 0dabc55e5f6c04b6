DROP FUNCTION afluente.request_reprocess(text, text, uuid, uuid, timestamptz, text, integer, bigint, timestamptz, text, text, jsonb);
DROP FUNCTION afluente.relay_settings();
DROP FUNCTION afluente.relay_open_transactions();
DROP TABLE afluente.relay_reprocess;
DROP TABLE afluente.relay_pause;
