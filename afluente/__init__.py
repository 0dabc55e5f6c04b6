"""How Afluente reaches the world: settings, Kafka, Postgres, telemetry, commands. Imports nothing on purpose."""
