-- needs: 0006
-- The category of a metric; 'custom' for those of an organization's own making.
-- A test holds this against the table in schemas/.
CREATE OR REPLACE FUNCTION afluente.metric_category(metric_name text)
RETURNS text
LANGUAGE sql
IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog
AS $$
    SELECT CASE
        WHEN metric_category.metric_name IN (
            'Order Placed', 'Order Paid', 'Order Cancelled', 'Order Fulfilled', 'Order Refunded', 'Checkout Started',
            'Checkout Abandoned', 'Checkout Recovered', 'Customer Created') THEN 'ecommerce'
        WHEN metric_category.metric_name IN (
            'Message Received', 'Message Sent', 'Message Delivered', 'Message Read', 'Message Failed', 'Template Sent',
            'Template Delivered', 'Template Read', 'Campaign Sent', 'AI Response Sent') THEN 'messaging'
        WHEN metric_category.metric_name IN (
            'Shipment Created', 'Shipment In Transit', 'Shipment Out For Delivery', 'Shipment Delivered',
            'Shipment Exception') THEN 'tracking'
        WHEN metric_category.metric_name = 'Link Clicked' THEN 'engagement'
        WHEN metric_category.metric_name IN (
            'Contact Created', 'Contact Updated', 'Tag Added', 'Tag Removed', 'Conversation Opened', 'Conversation Closed',
            'Conversation Assigned') THEN 'contact'
        ELSE 'custom'
    END
$$;
