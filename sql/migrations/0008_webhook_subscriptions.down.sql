DELETE FROM afluente.monthly_partitioned WHERE table_name = 'webhook_delivery_attempts'::regclass;
DROP TABLE webhook_delivery_attempts, webhook_subscription_secrets, webhook_subscriptions;
