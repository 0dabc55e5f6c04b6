"""What can stop a bench.

AfluenteError
└── BenchError          a measurement could not be made, or its output was not what it has to be: no figure is given
"""

from __future__ import annotations

from afluente.errors import AfluenteError


class BenchError(AfluenteError):
    """A peer did less than the work, or a program of the bench failed. The message says which and how."""
