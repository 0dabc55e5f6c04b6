"""Dead letters: find them, by cause too, reprocess them for the worker and target that failed, as they are or edited,
discard them, give them out. Used by the command line and the admin page. Those of the relay, which are rows and no
deliveries: `dead_letters.relay`. (`dead_letters.editing` is not imported here: it takes the models along.)"""

from consumers.dead_letters import relay
from consumers.dead_letters.actions import discard, export, reprocess
from consumers.dead_letters.causes import Cause, causes
from consumers.dead_letters.letters import (
    DEAD,
    STATES,
    Filter,
    Letter,
    Undecodable,
    described,
    described_event,
    each,
    find,
    find_undecodable,
    history_of,
    record_of,
)
from consumers.dead_letters.probe import Answer, probe
from consumers.dead_letters.relay import RelayLetter
from consumers.dead_letters.sending import Outcome, Pace

__all__ = [
    "DEAD",
    "STATES",
    "Answer",
    "Cause",
    "Filter",
    "Letter",
    "Outcome",
    "Pace",
    "RelayLetter",
    "Undecodable",
    "causes",
    "described",
    "described_event",
    "discard",
    "each",
    "export",
    "find",
    "find_undecodable",
    "history_of",
    "probe",
    "record_of",
    "relay",
    "reprocess",
]
