-- needs: 0009
-- Makes the parts of an organization's conversations that follow from messages again, from the ledger; returns how many
-- rows were wrong.
CREATE OR REPLACE FUNCTION afluente.rebuild_conversations(organization_id uuid) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _corrected bigint;
BEGIN
    -- Messages that come in meanwhile wait for these locks, and add themselves to what is counted here.
    PERFORM FROM public.conversations c
      WHERE c.organization_id = rebuild_conversations.organization_id ORDER BY c.id FOR UPDATE;
    UPDATE public.conversations c
       SET message_count = l.message_count,
           first_message_at = l.first_message_at,
           last_message_at = l.last_message_at,
           last_inbound_at = l.last_inbound_at
      FROM (SELECT d.id,
                   count(m.id)::integer AS message_count,
                   min(m.occurred_at) AS first_message_at,
                   max(m.occurred_at) AS last_message_at,
                   max(m.occurred_at) FILTER (WHERE m.direction = 'in') AS last_inbound_at
              FROM public.conversations d
              LEFT JOIN public.messages m ON m.organization_id = d.organization_id AND m.conversation_id = d.id
             WHERE d.organization_id = rebuild_conversations.organization_id
             GROUP BY d.id) l
     WHERE c.id = l.id
       AND c.organization_id = rebuild_conversations.organization_id
       AND (c.message_count, c.first_message_at, c.last_message_at, c.last_inbound_at)
           IS DISTINCT FROM (l.message_count, l.first_message_at, l.last_message_at, l.last_inbound_at);
    GET DIAGNOSTICS _corrected = ROW_COUNT;
    RETURN _corrected;
END;
$$;
REVOKE ALL ON FUNCTION afluente.rebuild_conversations(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.rebuild_conversations(uuid) TO afluente_worker;
