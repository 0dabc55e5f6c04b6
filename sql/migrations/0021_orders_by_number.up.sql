-- Couriers say which order a parcel is of by the number that people see, or by their own number of the shipment; until now
-- an order was found by its sender's id only.

-- Generated, as an index on an expression over jsonb is not used under row-level security.
ALTER TABLE orders ADD COLUMN tracking_number text GENERATED ALWAYS AS (left(tracking ->> 'number', 255)) STORED;
CREATE INDEX orders_number ON orders (organization_id, order_number) WHERE order_number IS NOT NULL;
CREATE INDEX orders_tracking ON orders (organization_id, tracking_number) WHERE tracking_number IS NOT NULL;
