"""Dead letters: find them, reprocess them for the worker and target that failed, discard them. Used by the command line
and the admin page."""

from consumers.dead_letters.actions import Outcome, discard, reprocess
from consumers.dead_letters.letters import Filter, Letter, Undecodable, find, find_undecodable, record_of, relay_letters

__all__ = [
    "Filter",
    "Letter",
    "Outcome",
    "Undecodable",
    "discard",
    "find",
    "find_undecodable",
    "record_of",
    "relay_letters",
    "reprocess",
]
