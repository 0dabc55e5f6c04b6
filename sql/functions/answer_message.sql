-- needs: 0025
-- Says which message another one answers, by the names that this may have, the most likely first: now if it is here, else
-- when it comes. In the caller's transaction and the session's organization.
-- SQLSTATE: AF001 no organization.
CREATE OR REPLACE FUNCTION answer_message(message_id uuid, names text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
    _answered        uuid;
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: messages belong to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction.';
    END IF;
    FOR _look IN 1 .. 2 LOOP
        IF _look = 2 THEN
            -- Somebody may be storing it at this moment: waited for, and then it is here.
            PERFORM pg_advisory_xact_lock(l.key)
               FROM (SELECT DISTINCT afluente.message_name_lock(_organization_id, n.name) AS key
                       FROM unnest(answer_message.names) n (name)
                      ORDER BY 1) l;
        END IF;
        SELECT m.id INTO _answered
          FROM unnest(answer_message.names) WITH ORDINALITY n (name, place)
         CROSS JOIN LATERAL (
                SELECT m.id
                  FROM public.messages m
                 WHERE m.organization_id = _organization_id AND m.waha_message_id = n.name
                 LIMIT 1) m
         ORDER BY n.place
         LIMIT 1;
        EXIT WHEN FOUND;
    END LOOP;
    IF _answered IS NOT NULL THEN
        UPDATE public.messages m
           SET reply_to = _answered
         WHERE m.organization_id = _organization_id AND m.id = answer_message.message_id;
    ELSE
        INSERT INTO public.awaited_messages (organization_id, name, answer_id)
        SELECT _organization_id, n.name, answer_message.message_id
          FROM unnest(answer_message.names) n (name)
         WHERE char_length(n.name) BETWEEN 1 AND 255
            ON CONFLICT DO NOTHING;
    END IF;
END;
$$;
REVOKE ALL ON FUNCTION answer_message(uuid, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION answer_message(uuid, text[]) TO afluente_app, afluente_worker, afluente_admin;
