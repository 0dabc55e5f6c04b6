-- needs: 0006
-- The contact event type that names the same facts as a metric; null when there is none. The reverse of metric_of.
CREATE OR REPLACE FUNCTION afluente.contact_event_type_of(metric_name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE contact_event_type_of.metric_name
        WHEN 'Order Paid' THEN 'purchase_completed'
        WHEN 'Checkout Abandoned' THEN 'purchase_abandoned'
        WHEN 'Conversation Opened' THEN 'conversation_started'
        WHEN 'Conversation Closed' THEN 'conversation_ended'
    END
$$;
REVOKE ALL ON FUNCTION afluente.contact_event_type_of(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.contact_event_type_of(text) TO afluente_app, afluente_worker, afluente_admin;
