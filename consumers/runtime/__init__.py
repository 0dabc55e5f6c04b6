"""The runtime of the workers: offsets, retry, lanes and records are pure; deliveries is the SQL, poll the Kafka side,
service puts them together. `testing` runs one handler against an event without a broker."""
