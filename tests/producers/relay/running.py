"""A relay of this process, in a thread, for as long as a `with` lasts."""

import threading
from contextlib import contextmanager

from producers.relay.service import Options, Relay


@contextmanager
def relay_of(topics, database, lane=0, **options):
    """A relay publishing `database` to `topics`; gives its thread. What ended it early is raised at the end."""
    relay = Relay(topics.settings, database.url, Options(**options), lane=lane)
    ended = []

    def run():
        try:
            relay.run()
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="relay")
    thread.start()
    try:
        yield thread
    except Exception as failed:
        if ended:  # that is why the test could not go on
            raise ended[0] from failed
        raise
    finally:
        relay.stop()
        thread.join(15)
        assert not thread.is_alive(), "the relay did not stop"
    if ended:
        raise ended[0]
