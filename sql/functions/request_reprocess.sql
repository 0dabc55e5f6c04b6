-- needs: 0013
-- Notes what is decided about a dead letter of the relay: `retry` asks the relay to publish its row again, `discard` closes
-- it. Returns the request's id, NULL when the letter was decided about already. The lock, held to the end of the
-- transaction, makes ids become visible in their order: the relay takes "every id up to n is answered" from it.
CREATE OR REPLACE FUNCTION afluente.request_reprocess(
    topic_prefix     text,
    action           text,
    organization_id  uuid,
    event_id         uuid,
    event_created_at timestamptz,
    event_type       text,
    letter_partition integer,
    letter_offset    bigint,
    letter_at        timestamptz,
    requested_by     text,
    reason           text,
    row_copy         jsonb
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s'
AS $$
DECLARE
    _id bigint;
BEGIN
    IF request_reprocess.action NOT IN ('retry', 'discard') IS NOT FALSE THEN
        RAISE EXCEPTION 'action % is neither retry nor discard', quote_nullable(request_reprocess.action)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);  -- an id that was answered must not be given out again
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('afluente.request_reprocess'));
    INSERT INTO afluente.relay_reprocess AS r
           (topic_prefix, organization_id, event_id, event_created_at, event_type, state, letter_partition, letter_offset,
            letter_at, requested_by, reason, row_copy, answered_at)
    SELECT request_reprocess.topic_prefix, request_reprocess.organization_id, request_reprocess.event_id,
           request_reprocess.event_created_at, request_reprocess.event_type,
           CASE request_reprocess.action WHEN 'retry' THEN 'requested' ELSE 'discarded' END,
           request_reprocess.letter_partition, request_reprocess.letter_offset, request_reprocess.letter_at,
           request_reprocess.requested_by, request_reprocess.reason,
           CASE WHEN request_reprocess.action = 'retry' THEN request_reprocess.row_copy END,
           CASE WHEN request_reprocess.action = 'discard' THEN clock_timestamp() END
        ON CONFLICT ON CONSTRAINT relay_reprocess_letter DO NOTHING
    RETURNING r.id INTO _id;
    RETURN _id;
END;
$$;
REVOKE ALL ON FUNCTION afluente.request_reprocess(text, text, uuid, uuid, timestamptz, text, integer, bigint, timestamptz, text, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.request_reprocess(text, text, uuid, uuid, timestamptz, text, integer, bigint, timestamptz, text, text, jsonb) TO afluente_worker;
