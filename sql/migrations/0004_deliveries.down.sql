DROP VIEW event_log_status;
DROP TABLE undecodable_record;
DELETE FROM afluente.monthly_partitioned WHERE table_name = 'event_delivery'::regclass;
DROP TABLE event_delivery;
DROP SEQUENCE event_delivery_block_order;
DROP TABLE worker_process;
DROP TABLE worker_event_types;
