DELETE FROM afluente.monthly_partitioned WHERE table_name = 'audit_logs'::regclass;
DROP TABLE alerts, audit_logs, api_keys, members, organizations;
