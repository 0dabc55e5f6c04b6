"""Kafka and Postgres on this machine, for the demo, the tests and whoever tries Afluente out.

`start_kafka` and `start_postgres` give private servers; `stack` chooses between named, Docker and embedded ones for
`afluente up`.
"""

from afluente.local.kafka import EmbeddedKafka, start_kafka, stop_kafka
from afluente.local.postgres import EmbeddedPostgres, start_postgres, stop_postgres

__all__ = ["EmbeddedKafka", "EmbeddedPostgres", "start_kafka", "start_postgres", "stop_kafka", "stop_postgres"]
