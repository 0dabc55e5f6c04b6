-- needs: 0009
-- Closes an open lead as lost and emits lead.lost, in the caller's transaction and organization. False when the lead is
-- not there or not open.
CREATE OR REPLACE FUNCTION mark_lead_lost(lead_id uuid, reason text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _lead public.leads;
BEGIN
    UPDATE public.leads l
       SET status = 'lost', lost_at = clock_timestamp(), closed_reason = mark_lead_lost.reason, updated_at = clock_timestamp()
     WHERE l.id = mark_lead_lost.lead_id
       AND l.status = 'open'
       AND l.deleted_at IS NULL
       AND l.organization_id = auth.organization_id()
    RETURNING * INTO _lead;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM public.emit_event('lead.lost', 'lead', _lead.id,
        jsonb_build_object('reason', COALESCE(mark_lead_lost.reason, ''), 'lost_at', _lead.lost_at));
    RETURN true;
END;
$$;
REVOKE ALL ON FUNCTION mark_lead_lost(uuid, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mark_lead_lost(uuid, text) TO afluente_app, afluente_admin, afluente_worker;
