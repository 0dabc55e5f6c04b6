"""Who gives a command: for what is written down about it."""

from __future__ import annotations

import getpass
import os


def who() -> str:
    """The login of the machine."""
    try:
        return getpass.getuser()
    except OSError:
        return f"uid {os.getuid()}"
