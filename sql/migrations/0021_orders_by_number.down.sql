DROP INDEX orders_tracking;
DROP INDEX orders_number;
ALTER TABLE orders DROP COLUMN tracking_number;
