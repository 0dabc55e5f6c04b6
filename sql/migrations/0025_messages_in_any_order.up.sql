-- Messages, what answers them and what becomes of them come in any order, and at the same moment.
--
-- Before: an answer that came before the message it answers never led to it; and a status that was stored in the same
-- moment as its message was seen by neither: the message stayed as it was sent.

-- The names that the answered message may have, kept until it is here.
ALTER TABLE messages ADD COLUMN reply_to_names text[];
GRANT INSERT (reply_to_names) ON messages TO afluente_app, afluente_admin, afluente_worker;
-- Serves: a message comes that was answered before.
CREATE INDEX messages_awaited ON messages USING gin (reply_to_names) WHERE reply_to_names IS NOT NULL;

-- Who gives a message its name and who brings something about a name that no message has: one of them waits for the
-- other's end, and then sees it. Those who give names do not wait for each other. Of few locks, because one transaction
-- may name thousands.
CREATE FUNCTION afluente.message_name_lock(organization_id uuid, name text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT hashtextextended(message_name_lock.organization_id || ':message:'
                            || (hashtextextended(message_name_lock.name, 0) & 127), 0)
$$;
REVOKE ALL ON FUNCTION afluente.message_name_lock(uuid, text) FROM PUBLIC;

CREATE FUNCTION afluente.answered_message(organization_id uuid, names text[]) RETURNS uuid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.id
      FROM public.messages m
     WHERE m.organization_id = answered_message.organization_id AND m.waha_message_id = ANY (answered_message.names)
     ORDER BY array_position(answered_message.names, m.waha_message_id)
     LIMIT 1
$$;
REVOKE ALL ON FUNCTION afluente.answered_message(uuid, text[]) FROM PUBLIC;

CREATE FUNCTION afluente.name_message() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NEW.waha_message_id IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(afluente.message_name_lock(NEW.organization_id, NEW.waha_message_id));
    END IF;
    RETURN NEW;
END;
$$;
CREATE TRIGGER name_message BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION afluente.name_message();
CREATE TRIGGER rename_message BEFORE UPDATE OF waha_message_id ON messages FOR EACH ROW
    WHEN (NEW.waha_message_id IS DISTINCT FROM OLD.waha_message_id) EXECUTE FUNCTION afluente.name_message();

CREATE FUNCTION afluente.find_answered() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.reply_to := afluente.answered_message(NEW.organization_id, NEW.reply_to_names);
    IF NEW.reply_to IS NULL THEN
        PERFORM pg_advisory_xact_lock(l.key)
           FROM (SELECT DISTINCT afluente.message_name_lock(NEW.organization_id, n.name) AS key
                   FROM unnest(NEW.reply_to_names) n (name)
                  ORDER BY 1) l;
        NEW.reply_to := afluente.answered_message(NEW.organization_id, NEW.reply_to_names);
    END IF;
    IF NEW.reply_to IS NOT NULL THEN
        NEW.reply_to_names := NULL;
    END IF;
    RETURN NEW;
END;
$$;
-- Before name_message: who waits for others does not hold them up.
CREATE TRIGGER find_answered BEFORE INSERT ON messages FOR EACH ROW
    WHEN (NEW.reply_to IS NULL AND NEW.reply_to_names IS NOT NULL) EXECUTE FUNCTION afluente.find_answered();

CREATE FUNCTION afluente.tell_answers() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE public.messages m
       SET reply_to = NEW.id,
           reply_to_names = NULL
     WHERE m.organization_id = NEW.organization_id
       AND m.reply_to_names @> ARRAY[NEW.waha_message_id]
       AND m.id <> NEW.id;
    RETURN NULL;
END;
$$;
CREATE TRIGGER tell_answers AFTER INSERT ON messages FOR EACH ROW
    WHEN (NEW.waha_message_id IS NOT NULL) EXECUTE FUNCTION afluente.tell_answers();
CREATE TRIGGER tell_answers_of_renamed AFTER UPDATE OF waha_message_id ON messages FOR EACH ROW
    WHEN (NEW.waha_message_id IS DISTINCT FROM OLD.waha_message_id) EXECUTE FUNCTION afluente.tell_answers();
REVOKE ALL ON FUNCTION afluente.name_message(), afluente.find_answered(), afluente.tell_answers() FROM PUBLIC;

-- As before, and the name's lock first, for what names no message of ours.
CREATE OR REPLACE FUNCTION afluente.lock_message() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NEW.message_id IS NULL AND NOT EXISTS (
        SELECT FROM public.messages m
         WHERE m.organization_id = NEW.organization_id AND m.waha_message_id = NEW.waha_message_id)
    THEN
        PERFORM pg_advisory_xact_lock(afluente.message_name_lock(NEW.organization_id, NEW.waha_message_id));
    END IF;
    PERFORM FROM public.messages m
      WHERE m.organization_id = NEW.organization_id
        AND (m.id = NEW.message_id OR (NEW.message_id IS NULL AND m.waha_message_id = NEW.waha_message_id))
        FOR UPDATE;
    RETURN NEW;
END;
$$;
