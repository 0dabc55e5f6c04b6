-- needs: 0009
-- Closes an open lead as won and emits lead.won, in the caller's transaction and organization. False when the lead is not
-- there or not open: whoever asks twice wins it once.
CREATE OR REPLACE FUNCTION mark_lead_won(lead_id uuid, reason text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _lead public.leads;
BEGIN
    UPDATE public.leads l
       SET status = 'won', won_at = clock_timestamp(), closed_reason = mark_lead_won.reason, updated_at = clock_timestamp()
     WHERE l.id = mark_lead_won.lead_id
       AND l.status = 'open'
       AND l.deleted_at IS NULL
       AND l.organization_id = auth.organization_id()
    RETURNING * INTO _lead;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM public.emit_event('lead.won', 'lead', _lead.id,
        jsonb_strip_nulls(jsonb_build_object('value', _lead.value::text, 'won_at', _lead.won_at, 'reason', mark_lead_won.reason)));
    RETURN true;
END;
$$;
REVOKE ALL ON FUNCTION mark_lead_won(uuid, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mark_lead_won(uuid, text) TO afluente_app, afluente_admin, afluente_worker;
