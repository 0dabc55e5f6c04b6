"""Dead letters: find them, reprocess them for the worker and target that failed, discard them. Used by the command line
and the admin page. Those of the relay, which are rows and no deliveries: `dead_letters.relay`."""

from consumers.dead_letters import relay
from consumers.dead_letters.actions import Outcome, discard, reprocess
from consumers.dead_letters.letters import Filter, Letter, Undecodable, find, find_undecodable, record_of
from consumers.dead_letters.relay import RelayLetter

__all__ = [
    "Filter",
    "Letter",
    "Outcome",
    "RelayLetter",
    "Undecodable",
    "discard",
    "find",
    "find_undecodable",
    "record_of",
    "relay",
    "reprocess",
]
