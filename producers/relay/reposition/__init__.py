"""`afluente relay reposition`: finds the place to go on from when a position no longer fits what is here.

case        what has happened, from the positions and the two identities. No I/O
content     what the topics hold: the ids of all that was published
table       what event_log holds, compared with that, and the restamping
mend        the steps, in the order that makes a crash between any two harmless
"""

from producers.relay.reposition.case import Case
from producers.relay.reposition.mend import Options, Outcome, Reposition

__all__ = ["Case", "Options", "Outcome", "Reposition"]
