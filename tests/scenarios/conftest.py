"""The oracle's writers and its plain read_committed consumer, which share no code with the relay."""

from tests.producers.relay.conftest import reader, writers

__all__ = ["reader", "writers"]
