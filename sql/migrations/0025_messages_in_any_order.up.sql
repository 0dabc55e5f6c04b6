-- Messages, what answers them and what becomes of them come in any order, and at the same moment.
--
-- Before: an answer that came before the message it answers never led to it; and a status that was stored in the same
-- moment as its message was seen by neither: the message stayed as it was sent.

-- What waits for a message that it answers, by each name that this may come under. A table of its own, because its key is
-- what every message that comes in is looked up by.
CREATE TABLE awaited_messages (
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    name            text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
    answer_id       uuid NOT NULL,
    PRIMARY KEY (organization_id, name, answer_id),
    FOREIGN KEY (organization_id, answer_id) REFERENCES messages (organization_id, id) ON DELETE CASCADE
);
CREATE INDEX awaited_messages_answer ON awaited_messages (organization_id, answer_id);  -- found by one name: the others go
SELECT tenancy.protect('awaited_messages');
GRANT SELECT ON awaited_messages TO afluente_app, afluente_admin;
GRANT SELECT, DELETE ON awaited_messages TO afluente_worker;  -- erasure: a name may hold the number of a person

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

CREATE FUNCTION afluente.tell_answers() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _answer_id uuid;
BEGIN
    FOR _answer_id IN
        SELECT w.answer_id
          FROM public.awaited_messages w
         WHERE w.organization_id = NEW.organization_id AND w.name = NEW.waha_message_id AND w.answer_id <> NEW.id
    LOOP
        UPDATE public.messages m
           SET reply_to = NEW.id
         WHERE m.organization_id = NEW.organization_id AND m.id = _answer_id AND m.reply_to IS NULL;
        DELETE FROM public.awaited_messages w
         WHERE w.organization_id = NEW.organization_id AND w.answer_id = _answer_id;
    END LOOP;
    RETURN NULL;
END;
$$;
CREATE TRIGGER tell_answers AFTER INSERT ON messages FOR EACH ROW
    WHEN (NEW.waha_message_id IS NOT NULL) EXECUTE FUNCTION afluente.tell_answers();
CREATE TRIGGER tell_answers_of_renamed AFTER UPDATE OF waha_message_id ON messages FOR EACH ROW
    WHEN (NEW.waha_message_id IS DISTINCT FROM OLD.waha_message_id) EXECUTE FUNCTION afluente.tell_answers();
REVOKE ALL ON FUNCTION afluente.name_message(), afluente.tell_answers() FROM PUBLIC;

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
