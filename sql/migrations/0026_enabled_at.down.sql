ALTER TABLE automations DROP COLUMN enabled_at;
