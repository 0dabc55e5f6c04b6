DROP FUNCTION afluente.reopen_delivery_month(date);
ALTER TABLE event_delivery DROP COLUMN replay;
DROP TABLE afluente.relay_replay;
