-- needs: 0003
-- Moves up to `max_rows` events that are due at `as_of` (default: now) into event_log, in the order of their times, under
-- the ids they already have; returns how many. Rows that another session is releasing or cancelling are left to it.
CREATE OR REPLACE FUNCTION release_due_deferred(max_rows integer DEFAULT 1000, as_of timestamptz DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _released integer;
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    WITH due AS (
        SELECT d.id
          FROM public.deferred_event d
         WHERE d.deliver_at <= COALESCE(release_due_deferred.as_of, clock_timestamp())
         ORDER BY d.deliver_at, d.id
         LIMIT release_due_deferred.max_rows
           FOR UPDATE SKIP LOCKED
    ), moved AS (
        DELETE FROM public.deferred_event d USING due WHERE d.id = due.id RETURNING d.*
    )
    INSERT INTO public.event_log (id, organization_id, event_type, entity_kind, entity_id, payload, metadata)
    SELECT m.id, m.organization_id, m.event_type, m.entity_kind, m.entity_id, m.payload, m.metadata
      FROM moved m
     ORDER BY m.deliver_at, m.id;
    GET DIAGNOSTICS _released = ROW_COUNT;
    RETURN _released;
END;
$$;
REVOKE ALL ON FUNCTION release_due_deferred(integer, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION release_due_deferred(integer, timestamptz) TO afluente_worker;
