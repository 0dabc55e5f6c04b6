-- needs: 0020
-- Resolves an open conversation, in the caller's transaction and the session's organization: emits conversation.resolved and
-- records conversation_ended ("Conversation Closed"). False when it is not there or not open: whoever asks twice closes it
-- once. `resolved_by` is a person's or a program's id; `metadata` goes along with both events, `properties`
-- with the fact.
CREATE OR REPLACE FUNCTION close_conversation(
    conversation_id uuid,
    resolved_by     text,
    note            text DEFAULT NULL,
    source          text DEFAULT 'crm',
    metadata        jsonb DEFAULT '{}',
    properties      jsonb DEFAULT '{}'
)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _conversation public.conversations;
    _duration_s   numeric;
BEGIN
    UPDATE public.conversations c
       SET status = 'resolved', resolved_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE c.organization_id = auth.organization_id()
       AND c.id = close_conversation.conversation_id
       AND c.status = 'open'
    RETURNING * INTO _conversation;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    _duration_s := round(extract(epoch FROM greatest(_conversation.resolved_at - _conversation.opened_at, interval '0')), 3);
    PERFORM public.emit_event('conversation.resolved', 'conversation', _conversation.id,
        jsonb_strip_nulls(jsonb_build_object(
            'resolved_by', close_conversation.resolved_by,
            'resolution_note', close_conversation.note,
            'duration_s', _duration_s,
            'conversation_id', _conversation.id,
            'contact_id', _conversation.contact_id)),
        close_conversation.metadata);
    PERFORM public.record_contact_event(
        contact_id        => _conversation.contact_id,
        event_type        => 'conversation_ended',
        source            => close_conversation.source,
        source_type       => 'INTERNAL',
        -- One that was opened again is closed again, at another time.
        external_event_id => format('conversation_closed:%s:%s', _conversation.id,
                                    to_char(_conversation.resolved_at AT TIME ZONE 'UTC', 'YYYYMMDD"T"HH24MISSUS')),
        entity_type       => 'conversation',
        entity_id         => _conversation.id::text,
        object_id         => _conversation.id::text,
        occurred_at       => _conversation.resolved_at,
        properties        => close_conversation.properties || jsonb_strip_nulls(jsonb_build_object(
            'channel', _conversation.channel,
            'durationSeconds', _duration_s,
            'messageCount', _conversation.message_count,
            'sentimentScore', (SELECT round(avg(m.sentiment_score), 3)
                                 FROM public.messages m
                                WHERE m.organization_id = _conversation.organization_id
                                  AND m.conversation_id = _conversation.id
                                  AND m.sentiment_score IS NOT NULL))),
        metadata          => close_conversation.metadata);
    RETURN true;
END
$$;
REVOKE ALL ON FUNCTION close_conversation(uuid, text, text, text, jsonb, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION close_conversation(uuid, text, text, text, jsonb, jsonb)
    TO afluente_app, afluente_worker, afluente_admin;
