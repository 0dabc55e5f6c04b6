"""The reconciliation: what the tables say happened beside what the topics hold, from both and from nothing else.

It shares no code with the relay, the worker runtime and the stream application: it would repeat their mistakes. From
`schemas` it takes topic names, from `afluente` the clients.
"""

from afluente.verify.reconciliation import reconcile
from afluente.verify.report import Check, Finding, Report

__all__ = ["Check", "Finding", "Report", "reconcile"]
