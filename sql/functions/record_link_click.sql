-- needs: 0019
-- Counts a click, once: the same click_id of a link is one click, and without one so is what comes within ten minutes of
-- the click before (a second tap, a reload, a browser that hands over to another). Ten different ids within that time
-- are the most that count: ids are the visitor's word. Returns the id of the click, or null
-- when it was counted already. For a contact's own link it records "Link Clicked" of whoever that contact is by now;
-- nobody's when the person was erased.
CREATE OR REPLACE FUNCTION record_link_click(link_id uuid, click_id text, clicked_at timestamptz) RETURNS uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
    _link    record;
    _contact uuid;
    _id      uuid;
BEGIN
    -- The link's row is the lock: two clicks of one link are judged one after the other.
    SELECT l.* INTO _link
      FROM public.tracked_links l
     WHERE l.organization_id = _organization_id AND l.id = record_link_click.link_id
       FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF (SELECT count(*)
          FROM public.link_clicks c
         WHERE c.organization_id = _organization_id AND c.link_id = _link.id
           AND c.clicked_at > record_link_click.clicked_at - interval '10 minutes'
           AND c.clicked_at < record_link_click.clicked_at + interval '10 minutes')
       >= (CASE WHEN record_link_click.click_id IS NULL THEN 1 ELSE 10 END)
    THEN
        RETURN NULL;
    END IF;

    WITH RECURSIVE person AS (
        SELECT c.id, c.merged_into, c.anonymized_at, 1 AS steps
          FROM public.contacts c
         WHERE c.organization_id = _organization_id AND c.id = _link.contact_id
         UNION ALL
        SELECT c.id, c.merged_into, c.anonymized_at, p.steps + 1
          FROM person p
          JOIN public.contacts c ON c.organization_id = _organization_id AND c.id = p.merged_into
         WHERE p.steps < 10
    )
    SELECT p.id INTO _contact FROM person p WHERE p.merged_into IS NULL AND p.anonymized_at IS NULL;

    INSERT INTO public.link_clicks (organization_id, link_id, contact_id, click_key, clicked_at)
    VALUES (_organization_id, _link.id, _contact,
            COALESCE('id:' || record_link_click.click_id,
                     'at:' || to_char(record_link_click.clicked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US')),
            record_link_click.clicked_at)
    ON CONFLICT ON CONSTRAINT link_clicks_organization_id_link_id_click_key_key DO NOTHING
    RETURNING id INTO _id;
    IF _id IS NULL THEN
        RETURN NULL;
    END IF;
    UPDATE public.tracked_links l
       SET clicks = l.clicks + 1,
           last_clicked_at = greatest(l.last_clicked_at, record_link_click.clicked_at)
     WHERE l.organization_id = _organization_id AND l.id = _link.id;

    IF _contact IS NOT NULL THEN
        PERFORM public.record_contact_event(
            contact_id        => _contact,
            metric_name       => 'Link Clicked',
            source            => 'tracking',
            source_type       => 'DIRECT',
            external_event_id => 'link_clicked:' || _id,
            entity_type       => 'link',
            entity_id         => _link.id::text,
            object_id         => _link.message_id::text,
            occurred_at       => record_link_click.clicked_at,
            properties        => jsonb_strip_nulls(jsonb_build_object(
                'url', _link.url,
                'link_id', _link.id,
                'message_id', _link.message_id,
                'automation_execution_id', _link.automation_run_id)),
            metadata          => jsonb_build_object('source', 'links'));
    END IF;
    RETURN _id;
END;
$$;
REVOKE ALL ON FUNCTION record_link_click(uuid, text, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION record_link_click(uuid, text, timestamptz) TO afluente_app, afluente_worker, afluente_admin;
