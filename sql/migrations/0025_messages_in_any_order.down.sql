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
DROP TRIGGER rename_message ON messages;
DROP TRIGGER name_message ON messages;
DROP FUNCTION answer_message(uuid, text[]);
DROP FUNCTION afluente.tell_answers();
DROP FUNCTION afluente.name_message();
DROP FUNCTION afluente.message_name_lock(uuid, text);
DROP TABLE awaited_messages;
