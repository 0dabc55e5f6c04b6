"""Work waiting and no step made for so long ends the process; nothing else does."""

from streams.watchdog import STUCK, Watchdog


class Ended(BaseException):
    pass


def end(status, reason):
    assert status == STUCK
    raise Ended(reason)


def looked(watchdog, clock, seconds):
    clock.advance(seconds)
    try:
        watchdog.look()
    except Ended as error:
        return str(error)
    return None


def test_no_progress_with_records_waiting_ends_it(clock):
    watchdog = Watchdog(waiting=lambda: 7, progress=lambda: 3, exit=end, patience_s=60, clock=clock)
    assert looked(watchdog, clock, 59.9) is None
    assert looked(watchdog, clock, 0.2) == "7 records waiting and no progress for 60 s"


def test_progress_starts_the_time_anew(clock):
    steps = iter([0, 0, 1, 1, 1])
    watchdog = Watchdog(waiting=lambda: 7, progress=lambda: next(steps), exit=end, patience_s=60, clock=clock)
    assert looked(watchdog, clock, 59) is None
    assert looked(watchdog, clock, 59) is None
    assert looked(watchdog, clock, 59) is None
    assert looked(watchdog, clock, 2) is not None


def test_nothing_waiting_never_ends_it(clock):
    waiting = iter([0, 0, 1, 1])
    watchdog = Watchdog(waiting=lambda: next(waiting), progress=lambda: 0, exit=end, patience_s=60, clock=clock)
    assert looked(watchdog, clock, 3600) is None
    assert looked(watchdog, clock, 3600) is None
    assert looked(watchdog, clock, 59) is None, "counted from when nothing was waiting last"
    assert looked(watchdog, clock, 2) is not None
