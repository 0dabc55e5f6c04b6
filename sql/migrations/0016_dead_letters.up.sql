-- What people do with dead letters: an edited event belongs to one delivery only, and what is done to records that are no
-- event is written down like everything else, though they have no organization whose audit log could hold it.

-- The event's own record, in its topic and in event_log, must not run in place of the edited one: a record whose value has
-- another sha256 than this is a duplicate to the delivery. Everything that a delivery goes through passes values on untouched.
ALTER TABLE event_delivery
    ADD COLUMN edited_sha256 bytea CHECK (octet_length(edited_sha256) = 32);
COMMENT ON COLUMN event_delivery.edited_sha256 IS 'Of the record value that a person gave this delivery in place of the event''s; NULL: none did.';

CREATE TABLE undecodable_audit (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker            text NOT NULL,
    topic             text NOT NULL,
    partition         integer NOT NULL,
    record_offset     bigint NOT NULL,
    record_timestamp  timestamptz NOT NULL,
    action            text NOT NULL CHECK (action ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$'),
    actor             text NOT NULL CHECK (char_length(actor) <= 255),
    details           jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object'),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE undecodable_audit IS 'Who did what with a record that is no event, and why: what audit_logs is to events.';
CREATE INDEX undecodable_audit_record ON undecodable_audit (worker, topic, partition, record_offset, record_timestamp);  -- `dlq show`
GRANT SELECT, INSERT ON undecodable_audit TO afluente_worker;
