CREATE OR REPLACE FUNCTION afluente.lock_message() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM public.messages m
      WHERE m.organization_id = NEW.organization_id
        AND (m.id = NEW.message_id OR (NEW.message_id IS NULL AND m.waha_message_id = NEW.waha_message_id))
        FOR UPDATE;
    RETURN NEW;
END;
$$;
DROP TRIGGER tell_answers_of_renamed ON messages;
DROP TRIGGER tell_answers ON messages;
DROP TRIGGER find_answered ON messages;
DROP TRIGGER rename_message ON messages;
DROP TRIGGER name_message ON messages;
DROP FUNCTION afluente.tell_answers();
DROP FUNCTION afluente.find_answered();
DROP FUNCTION afluente.name_message();
DROP FUNCTION afluente.answered_message(uuid, text[]);
DROP FUNCTION afluente.message_name_lock(uuid, text);
ALTER TABLE messages DROP COLUMN reply_to_names;
