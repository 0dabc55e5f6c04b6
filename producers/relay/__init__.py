"""The outbox relay: publishes what has been committed to `event_log` on Kafka, exactly once, in causal order."""
