-- needs: 0020
-- The open conversation of a contact on a channel, opened if there is none, in the caller's transaction and the session's
-- organization. A new one emits conversation.opened and records conversation_started ("Conversation Opened"); the last
-- parameters are what is said of that fact (record_contact_event).
-- SQLSTATE: AF001 no organization, AF010 not a contact of it.
CREATE OR REPLACE FUNCTION open_conversation(
    contact_id          uuid,
    channel_id          uuid,
    channel             text DEFAULT 'whatsapp',
    context             jsonb DEFAULT '{}',
    source              text DEFAULT 'crm',
    metadata            jsonb DEFAULT '{}',
    properties          jsonb DEFAULT '{}',
    source_type         text DEFAULT 'INTERNAL',
    occurred_at         timestamptz DEFAULT NULL,
    received_at         timestamptz DEFAULT NULL,
    integration_id      uuid DEFAULT NULL,
    webhook_event_id    uuid DEFAULT NULL,
    OUT conversation_id uuid,
    OUT opened          boolean
)
RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    _organization_id uuid := auth.organization_id();
    _contact_id      uuid := afluente.require_contact(_organization_id, open_conversation.contact_id);
BEGIN
    LOOP
        INSERT INTO public.conversations (organization_id, contact_id, channel_id, channel, context)
        VALUES (_organization_id, _contact_id, open_conversation.channel_id, open_conversation.channel,
                open_conversation.context)
        ON CONFLICT (organization_id, contact_id, channel_id) WHERE status = 'open' DO NOTHING
        RETURNING id INTO conversation_id;
        opened := FOUND;
        EXIT WHEN opened;
        SELECT c.id INTO conversation_id
          FROM public.conversations c
         WHERE c.organization_id = _organization_id
           AND c.contact_id = _contact_id
           AND c.channel_id IS NOT DISTINCT FROM open_conversation.channel_id
           AND c.status = 'open';
        EXIT WHEN FOUND;
        -- Closed in between: open another.
    END LOOP;
    IF opened THEN
        PERFORM public.emit_event('conversation.opened', 'conversation', conversation_id,
            jsonb_build_object('conversation_id', conversation_id, 'contact_id', _contact_id,
                               'channel', open_conversation.channel),
            open_conversation.metadata);
        PERFORM public.record_contact_event(
            contact_id        => _contact_id,
            event_type        => 'conversation_started',
            source            => open_conversation.source,
            source_type       => open_conversation.source_type,
            external_event_id => 'conversation_opened:' || conversation_id,
            entity_type       => 'conversation',
            entity_id         => conversation_id::text,
            object_id         => conversation_id::text,
            occurred_at       => open_conversation.occurred_at,
            received_at       => open_conversation.received_at,
            properties        => open_conversation.properties || jsonb_build_object('channel', open_conversation.channel),
            integration_id    => open_conversation.integration_id,
            webhook_event_id  => open_conversation.webhook_event_id,
            metadata          => open_conversation.metadata);
    END IF;
END
$$;
REVOKE ALL ON FUNCTION open_conversation(uuid, uuid, text, jsonb, text, jsonb, jsonb, text, timestamptz, timestamptz, uuid,
    uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION open_conversation(uuid, uuid, text, jsonb, text, jsonb, jsonb, text, timestamptz, timestamptz, uuid,
    uuid) TO afluente_app, afluente_worker, afluente_admin;
