"""A stop is heard whatever the main thread is doing, and does not wait for itself."""

import os
import signal
import subprocess
import sys
import threading

from afluente.signals import stopped_by_signals

# Six hundred signals into a main thread that is nearly always inside Event.wait. A handler that sets the event itself
# stops at one of the first hundred for ever.
UNDER_FIRE = """
import os, signal, threading
from afluente.signals import stopped_by_signals

stop, over, heard = threading.Event(), threading.Event(), []

def stopped():
    heard.append(1)
    stop.set()

def fire():
    for number in range(600):
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait(0.0002)
    over.set()

with stopped_by_signals(stopped):
    threading.Thread(target=fire).start()
    while not over.is_set():
        stop.clear()
        while not stop.wait(0) and not over.is_set():
            pass
print(len(heard))
"""


def test_a_signal_in_the_middle_of_a_wait_is_heard():
    done = subprocess.run([sys.executable, "-c", UNDER_FIRE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_what_was_handled_before_is_handled_again():
    before, heard = signal.getsignal(signal.SIGTERM), threading.Event()
    with stopped_by_signals(heard.set, [signal.SIGTERM]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(10)
    assert signal.getsignal(signal.SIGTERM) is before
