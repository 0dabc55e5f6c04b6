-- needs: 0020
-- Says that two contacts are one person: `from_contact_id` goes, `into_contact_id` stays. In the session's organization, in
-- the caller's transaction, written to the audit log with who and why, and emitted as contact.merged.
--
-- Moved: identities, tags, conversations, messages, orders, leads, automation runs, tracked links. What is unknown of the one
-- that stays is filled; its subscriber state is the newer of the two. An open conversation of each on one channel leaves one
-- open. Contact events are append-only and keep the id they were recorded with: a person's events are those of
-- afluente.contact_ids, and its summaries are read together (contact_metrics_summary_v), so nothing depends on whether an
-- event came before or after the merge. What is written for the merged-away contact afterwards lands on the one that stays
-- (afluente.surviving_contact), and what is being written meanwhile is waited for.
--
-- Contacts merged before stand for the ones they were merged into. Merged already: `merged` is false and nothing happens.
-- SQLSTATE: AF001 no organization, AF010 not a contact of it, AF020 the same contact twice, AF021 an anonymized one,
-- AF022 without who or why.
CREATE OR REPLACE FUNCTION merge_contacts(
    from_contact_id   uuid,
    into_contact_id   uuid,
    actor_id          text,
    reason            text,
    actor_kind        text DEFAULT 'member',
    metadata          jsonb DEFAULT '{}',
    OUT contact_id    uuid,
    OUT merged        boolean,
    OUT merged_fields text[],
    OUT moved         jsonb
)
RETURNS record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Tables whose rows simply belong to the other contact from now on. A test compares what is moved here with the foreign
    -- keys to contacts.
    _MOVED CONSTANT text[] := '{contact_identities,conversations,messages,orders,leads,automation_runs,tracked_links,link_clicks}';
    _organization_id uuid := auth.organization_id();
    _table    text;
    _ids      uuid[];
    _from     public.contacts;
    _into     public.contacts;
    _newer    boolean;
    _open     record;
    _count    bigint;
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: contacts belong to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction.';
    END IF;
    IF from_contact_id = into_contact_id THEN
        RAISE EXCEPTION 'contact % cannot be merged into itself', from_contact_id USING ERRCODE = 'AF020';
    END IF;
    IF COALESCE(btrim(actor_id), '') = '' OR COALESCE(btrim(reason), '') = '' THEN
        RAISE EXCEPTION 'a merge says who decided it and why' USING ERRCODE = 'AF022',
            HINT = 'Pass actor_id and reason: they go to the audit log.';
    END IF;

    -- 1. Hold both contacts: first the locks that upsert_contact holds while it writes for one of their identities, then the
    -- rows, whose lock waits for everything that is being written with a reference to them. In one order each, so that two
    -- merges of the same two wait for each other. Until then one of them may have been merged: look again.
    LOOP
        _ids := ARRAY[from_contact_id, into_contact_id];
        SELECT array_agg(COALESCE(c.merged_into, c.id) ORDER BY g.place) INTO _ids
          FROM unnest(_ids) WITH ORDINALITY g (id, place)
          JOIN public.contacts c ON c.organization_id = _organization_id AND c.id = g.id;
        IF cardinality(_ids) IS DISTINCT FROM 2 THEN
            RAISE EXCEPTION 'contacts % and % are not both of organization %', from_contact_id, into_contact_id,
                _organization_id USING ERRCODE = 'AF010', HINT = 'afluente contact list shows the contacts.';
        END IF;
        contact_id := _ids[2];
        IF _ids[1] = _ids[2] THEN
            merged := false;
            merged_fields := '{}';
            moved := '{}';
            RETURN;
        END IF;
        PERFORM pg_advisory_xact_lock(l.key)
           FROM (SELECT DISTINCT afluente.identity_lock(i.organization_id, i.kind, i.source, i.value) AS key
                   FROM public.contact_identities i
                  WHERE i.organization_id = _organization_id AND i.contact_id = ANY (_ids)
                  ORDER BY 1) l;
        PERFORM FROM public.contacts c
          WHERE c.organization_id = _organization_id AND c.id = ANY (_ids)
          ORDER BY c.id
            FOR UPDATE;
        SELECT * INTO _from FROM public.contacts c WHERE c.organization_id = _organization_id AND c.id = _ids[1];
        SELECT * INTO _into FROM public.contacts c WHERE c.organization_id = _organization_id AND c.id = _ids[2];
        EXIT WHEN _from.merged_into IS NULL AND _into.merged_into IS NULL;
    END LOOP;
    IF _from.anonymized_at IS NOT NULL OR _into.anonymized_at IS NOT NULL THEN
        RAISE EXCEPTION 'contact % is anonymized', CASE WHEN _from.anonymized_at IS NULL THEN _into.id ELSE _from.id END
            USING ERRCODE = 'AF021', HINT = 'Who was erased stays erased: nothing is merged with them.';
    END IF;

    SELECT jsonb_build_object('contact_events', count(*)) INTO moved
      FROM public.contact_events e
     WHERE e.organization_id = _organization_id
       AND e.contact_id = ANY (afluente.contact_ids(_organization_id, _from.id));

    -- 2. What is known of the person. The newest word about messages counts; of two at one time the stricter one.
    _newer := _from.subscriber_state <> _into.subscriber_state
          AND (COALESCE(_from.subscriber_state_at, '-infinity'),
               array_position('{unknown,subscribed,unsubscribed,blocked}', _from.subscriber_state))
            > (COALESCE(_into.subscriber_state_at, '-infinity'),
               array_position('{unknown,subscribed,unsubscribed,blocked}', _into.subscriber_state));
    merged_fields := array_remove(ARRAY[
        CASE WHEN _into.name IS NULL AND _from.name IS NOT NULL THEN 'name' END,
        CASE WHEN _into.phone_e164 IS NULL AND _from.phone_e164 IS NOT NULL THEN 'phone' END,
        CASE WHEN _into.email IS NULL AND _from.email IS NOT NULL THEN 'email' END,
        CASE WHEN _newer THEN 'subscriber_state' END], NULL);
    UPDATE public.contacts c
       SET name = COALESCE(c.name, _from.name),
           phone_e164 = COALESCE(c.phone_e164, _from.phone_e164),
           email = COALESCE(c.email, _from.email),
           subscriber_state = CASE WHEN _newer THEN _from.subscriber_state ELSE c.subscriber_state END,
           subscriber_state_at = CASE
               WHEN _newer THEN _from.subscriber_state_at
               -- the same word twice: the later time is the one that other words are measured by
               WHEN _from.subscriber_state = c.subscriber_state
                   THEN greatest(_from.subscriber_state_at, c.subscriber_state_at)
               ELSE c.subscriber_state_at
           END,
           updated_at = clock_timestamp()
     WHERE c.organization_id = _organization_id AND c.id = _into.id;
    -- One step deep, so that nobody has to walk a chain.
    UPDATE public.contacts c
       SET merged_into = _into.id,
           updated_at = clock_timestamp()
     WHERE c.organization_id = _organization_id AND (c.id = _from.id OR c.merged_into = _from.id);

    -- 3. What hangs on it.
    INSERT INTO public.contact_tag_links (organization_id, contact_id, tag_id, created_at)
    SELECT t.organization_id, _into.id, t.tag_id, t.created_at
      FROM public.contact_tag_links t
     WHERE t.organization_id = _organization_id AND t.contact_id = _from.id
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS _count = ROW_COUNT;
    moved := moved || jsonb_build_object('contact_tag_links', _count);
    DELETE FROM public.contact_tag_links t WHERE t.organization_id = _organization_id AND t.contact_id = _from.id;

    FOR _open IN
        SELECT CASE WHEN COALESCE(f.last_message_at, f.opened_at) > COALESCE(i.last_message_at, i.opened_at)
                    THEN i.id ELSE f.id END AS id
          FROM public.conversations f
          JOIN public.conversations i
            ON i.organization_id = f.organization_id AND i.contact_id = _into.id AND i.status = 'open'
           AND i.channel_id IS NOT DISTINCT FROM f.channel_id
         WHERE f.organization_id = _organization_id AND f.contact_id = _from.id AND f.status = 'open'
         ORDER BY 1
    LOOP
        PERFORM public.close_conversation(_open.id, merge_contacts.actor_id, 'the contacts were merged', 'merge',
                                          merge_contacts.metadata);
    END LOOP;
    FOREACH _table IN ARRAY _MOVED
    LOOP
        EXECUTE format('UPDATE public.%I SET contact_id = $1 WHERE organization_id = $2 AND contact_id = $3', _table)
          USING _into.id, _organization_id, _from.id;
        GET DIAGNOSTICS _count = ROW_COUNT;
        moved := moved || jsonb_build_object(_table, _count);
    END LOOP;

    -- 4. Say so. The question whether the two are one person is answered.
    UPDATE public.alerts a
       SET status = 'resolved', resolved_at = clock_timestamp()
     WHERE a.organization_id = _organization_id AND a.kind = 'contact_conflict' AND a.status <> 'resolved'
       AND a.details ? 'contact_ids'
       AND NOT EXISTS (SELECT FROM jsonb_array_elements_text(a.details -> 'contact_ids') d (id)
                         JOIN public.contacts c ON c.organization_id = _organization_id AND c.id::text = d.id
                        WHERE COALESCE(c.merged_into, c.id) <> _into.id);
    INSERT INTO public.audit_logs (organization_id, actor_kind, actor_id, action, entity_kind, entity_id, details, metadata)
    VALUES (_organization_id, merge_contacts.actor_kind, left(merge_contacts.actor_id, 255), 'contact.merged', 'contact',
            _into.id::text,
            jsonb_build_object('from_contact_id', _from.id, 'into_contact_id', _into.id, 'reason', merge_contacts.reason,
                               'merged_fields', merged_fields, 'moved', moved),
            merge_contacts.metadata);
    PERFORM public.emit_event_for(
        _organization_id, 'contact.merged', 'contact', _into.id,
        jsonb_build_object('from_contact_id', _from.id, 'into_contact_id', _into.id, 'merged_fields', merged_fields),
        jsonb_build_object('actor_id', left(merge_contacts.actor_id, 255)) || merge_contacts.metadata);
    contact_id := _into.id;
    merged := true;
END
$$;
REVOKE ALL ON FUNCTION merge_contacts(uuid, uuid, text, text, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION merge_contacts(uuid, uuid, text, text, text, jsonb)
    TO afluente_app, afluente_worker, afluente_admin;
