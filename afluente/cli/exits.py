"""What the exit status of every command means."""

from enum import IntEnum


class Exit(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2  # wrong usage, wrong settings, or a question with nobody to answer
    FOUND = 3  # looked, and found something: a plan with changes, drift, findings; or nothing matched
    NOT_ALLOWED = 4
    PARTLY = 5  # see `failed` in the output
    TRY_AGAIN = 75  # a dependency is away
    INTERRUPTED = 130
