-- needs: 0020
-- Gives a conversation to a member, in the caller's transaction and the session's organization: emits conversation.assigned
-- and records "Conversation Assigned". False when it is theirs already, or is not there. A member of another organization
-- is refused by the foreign key.
CREATE OR REPLACE FUNCTION assign_conversation(
    conversation_id uuid,
    member_id       uuid,
    mode            text DEFAULT 'manual',
    source          text DEFAULT 'crm',
    metadata        jsonb DEFAULT '{}'
)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
    _before          public.conversations;
BEGIN
    SELECT * INTO _before
      FROM public.conversations c
     WHERE c.organization_id = _organization_id AND c.id = assign_conversation.conversation_id
       FOR NO KEY UPDATE;
    IF NOT FOUND OR _before.assigned_to IS NOT DISTINCT FROM assign_conversation.member_id
       OR assign_conversation.member_id IS NULL
    THEN
        RETURN false;
    END IF;
    UPDATE public.conversations c
       SET assigned_to = assign_conversation.member_id, updated_at = clock_timestamp()
     WHERE c.organization_id = _organization_id AND c.id = _before.id;
    PERFORM public.emit_event('conversation.assigned', 'conversation', _before.id,
        jsonb_strip_nulls(jsonb_build_object(
            'from_user_id', _before.assigned_to,
            'to_user_id', assign_conversation.member_id,
            'mode', assign_conversation.mode)),
        assign_conversation.metadata);
    -- Without a name: the same member may get it again later, and the row above says whether this is a change.
    PERFORM public.record_contact_event(
        contact_id  => _before.contact_id,
        metric_name => 'Conversation Assigned',
        source      => assign_conversation.source,
        source_type => 'INTERNAL',
        entity_type => 'conversation',
        entity_id   => _before.id::text,
        object_id   => _before.id::text,
        properties  => jsonb_strip_nulls(jsonb_build_object(
            'from_member_id', _before.assigned_to,
            'to_member_id', assign_conversation.member_id,
            'mode', assign_conversation.mode)),
        metadata    => assign_conversation.metadata);
    RETURN true;
END
$$;
REVOKE ALL ON FUNCTION assign_conversation(uuid, uuid, text, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION assign_conversation(uuid, uuid, text, text, jsonb)
    TO afluente_app, afluente_worker, afluente_admin;
