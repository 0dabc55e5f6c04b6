-- The status of a gateway's session was only ever an event: nobody could say what a change changed from, and a status
-- that came late would have passed for the newest.
CREATE TABLE whatsapp_sessions (
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    channel_id      uuid NOT NULL,
    session         text NOT NULL CHECK (char_length(session) BETWEEN 1 AND 255),
    status          text NOT NULL CHECK (char_length(status) BETWEEN 1 AND 100),
    status_at       timestamptz NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, channel_id, session),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id) ON DELETE CASCADE
);
COMMENT ON COLUMN whatsapp_sessions.status_at IS 'When the gateway last said so, by its own time; what is older changes nothing.';
SELECT tenancy.protect('whatsapp_sessions');
GRANT SELECT, INSERT, UPDATE ON whatsapp_sessions TO afluente_app, afluente_admin, afluente_worker;
