-- needs: 0006
-- The metric that names the same facts as a contact event type; null when there is none. One fact is one row with both
-- columns, whichever of the two its source knows. A test holds this against the table in schemas/.
CREATE OR REPLACE FUNCTION afluente.metric_of(event_type text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE metric_of.event_type
        WHEN 'purchase_completed' THEN 'Order Paid'
        WHEN 'purchase_abandoned' THEN 'Checkout Abandoned'
        WHEN 'conversation_started' THEN 'Conversation Opened'
        WHEN 'conversation_ended' THEN 'Conversation Closed'
    END
$$;
REVOKE ALL ON FUNCTION afluente.metric_of(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.metric_of(text) TO afluente_app, afluente_worker, afluente_admin;
