"""Many faults in one run, under load, with a transaction always open: at the end the view of a read_committed consumer
is the table, once each and in causal order.

Two relays run at any time, one owns the lane and one stands by; each is given one fault when it starts. The faults, the
writers and the moments are of a seed, which is printed; AFLUENTE_TEST_SEED plays it again, as far as two runs can be
the same. Kills at named points are counted from the log that the points write: a point that nobody passed fails.
"""

import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from enum import Enum

import psycopg
import pytest

from afluente import local
from tests.faults.test_relay_postgres_crash import CrashingServer, given_out_again
from tests.fixtures.kafka import Kafka
from tests.fixtures.processes import Processes
from tests.fixtures.topics import TestTopics
from tests.producers.relay.oracle import Reader, Writers, assert_exactly_once_in_order

POINTS = ("relay.after_read", "relay.after_send", "relay.before_commit", "relay.after_commit", "relay.in_init")
CHUNK_ROWS = 10


class Fault(Enum):
    AT_A_POINT = "SIGKILL at a named point"
    AT_RANDOM = "SIGKILL at a random moment"
    ZOMBIE = "SIGSTOP at a named point, taken over, and woken"
    BROKER = "kill -9 of the broker when a commit has just returned"
    POSTGRES = "kill -9 of Postgres inside a window, with transaction ids given out again"


class Load:
    """Writers in the background, at a pace, and a transaction that is always open. Postgres may go away under them."""

    def __init__(self, database, seed):
        self.database, self.writers = database, Writers(database)
        self._held_for = self.writers.add(database.organization("always open"))
        self._held = None
        self._stop, self._flows = threading.Event(), threading.Event()
        self._flows.set()
        self._idle = threading.Condition()
        self._busy = 0
        self.hold()
        self._threads = [threading.Thread(target=self._write, args=(f"{seed}-{n}",)) for n in range(3)]
        for thread in self._threads:
            thread.start()

    def hold(self):
        """Commit the open transaction, and open the next. It is lost when Postgres was."""
        with suppress(psycopg.Error):
            if self._held is not None:
                self._held.commit()
        with suppress(psycopg.Error):
            if self._held is not None:
                self._held.close()
            self._held = self.database.connect()
            self.writers.emit(self._held, self._held_for, 2)

    def pause(self):
        """Returns when no transaction but the open one is under way."""
        self._flows.clear()
        with self._idle:
            assert self._idle.wait_for(lambda: self._busy == 0, 20)

    def resume(self):
        self._flows.set()

    def stop(self):
        self._stop.set()
        self._flows.set()
        for thread in self._threads:
            thread.join()
        with suppress(psycopg.Error):
            self._held.commit()

    def _write(self, seed):
        chance = random.Random(seed)
        while not self._stop.wait(chance.random() * 0.4):
            self._flows.wait()
            with self._idle:
                self._busy += 1
            try:
                with self.database.connect() as conn:
                    for _ in range(10):
                        self.writers._transaction(conn, chance, chance.choice([1, 1, 2, 3, 10, 40]))
            except psycopg.Error:
                self._stop.wait(0.2)
            finally:
                with self._idle:
                    self._busy -= 1
                    self._idle.notify_all()


class Chaos:
    """Plays faults one after the other. `broker` and `server` are ours to kill, where there are such faults."""

    def __init__(self, seed, database, topics, processes, folder, *, broker=None, server=None):
        self.chance = random.Random(seed)
        self.database, self.topics, self.processes = database, topics, processes
        self.broker, self.server = broker, server
        self.log = folder / "faults"
        self.reader = Reader(topics)
        self.load = Load(database, seed)
        self.aborted = []
        self.kills = 0

    def run(self, faults):
        """All of `faults`, and an undisturbed relay at the end that publishes what is left."""
        relay = self._start(faults[0])
        for number, fault in enumerate(faults):
            self._until_it_owns(relay)
            following = faults[number + 1] if number + 1 < len(faults) else None
            # The next one stands by before the fault strikes, mostly, but it must not come first. When Postgres dies
            # both lose their sessions, and whichever is back first has the lane.
            standing_by = None if fault is Fault.POSTGRES else self._start(following)
            self._play(fault, relay, standing_by)
            relay = standing_by or self._start(following)
            if self.chance.random() < 0.3:
                self.load.hold()
        self.load.stop()
        self.reader.wait_for(len(self.database.execute("SELECT 1 FROM event_log")), timeout=120)
        assert relay.terminate() == 0
        records = self.reader.read_to_the_end()
        self.reader.close()
        assert_exactly_once_in_order(self.database, records)
        return records

    def struck(self, action="KILL"):
        """How often each point struck."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(line.split()[0] for line in lines if line.endswith(action))

    def _start(self, fault):
        env = {}
        if fault in (Fault.AT_A_POINT, Fault.ZOMBIE):
            # In turn, so that none is left out.
            self._turn = getattr(self, "_turn", -1) + 1
            point = POINTS[self._turn % len(POINTS)]
            at = 1 if point == "relay.in_init" else self.chance.randint(1, 6)
            env["AFLUENTE_FAULT"] = f"{point}:{at}:{'KILL' if fault is Fault.AT_A_POINT else 'STOP'}"
        if fault is Fault.BROKER:
            env["AFLUENTE_FAULT"] = f"relay.after_commit:{self.chance.randint(2, 6)}:STOP"
        chunks = () if fault is None else ("--chunk-rows", str(CHUNK_ROWS))
        return self.processes.start("relay", "run", *chunks, env=env | {"AFLUENTE_FAULT_LOG": self.log})

    def _play(self, fault, relay, standing_by):
        if fault is Fault.AT_A_POINT:
            assert relay.wait(60) == -signal.SIGKILL, relay.tail()
            self.kills += 1
            return
        if fault is Fault.ZOMBIE:
            self._until_stopped(relay)
            self._until_it_owns(standing_by)
            relay.signal(signal.SIGCONT)
            assert relay.wait(30) == 3, relay.tail()
            return
        relay.wait_for("relay.ready", timeout=60)
        if fault is Fault.BROKER:
            self._until_stopped(relay)
            self.broker.kill()
            relay.signal(signal.SIGCONT)
            local.start_kafka(self.broker.folder)
            relay.wait_for("relay.ready", count=2, timeout=90)
        elif fault is Fault.POSTGRES:
            self._crash_postgres(relay)
            relay.wait_for("relay.ready", count=2, timeout=60)
        else:
            threading.Event().wait(self.chance.random())
        relay.kill()
        self.kills += 1

    def _until_it_owns(self, relay):
        waiting = threading.Event()
        while relay.returncode is None and f"-{relay.pid}-" not in owner_of(self.database):
            waiting.wait(0.05)

    def _until_stopped(self, relay):
        waiting = threading.Event()
        while f" {relay.pid} STOP" not in (self.log.read_text() if self.log.exists() else ""):
            assert relay.returncode is None, relay.tail()
            waiting.wait(0.02)

    def _crash_postgres(self, relay):
        """Rows that the relay has not seen, then ids that are aborted and not on disk; the relay reads, its position
        counts those ids as ended, and the server dies. Nothing may be committed meanwhile, the lease neither: a commit
        writes everything before it to disk."""
        self.load.pause()
        renewed = "SELECT renewed_at FROM afluente.relay_lane"
        before = self.database.execute(renewed)
        waiting = threading.Event()
        while self.database.execute(renewed) == before:
            waiting.wait(0.02)
        relay.signal(signal.SIGSTOP)
        for number in range(4):
            self.load.writers.commit(CHUNK_ROWS, self.load.writers.organizations[number])
        aborted = self.server.abort_unflushed(self.database)
        taken = len(self.reader.records)
        relay.signal(signal.SIGCONT)
        self.reader.wait_for(taken + 1)
        self.server.crash()
        self.aborted += aborted
        self.load.resume()


def seed_of_this_run():
    seed = int(os.environ.get("AFLUENTE_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"AFLUENTE_TEST_SEED={seed}")
    return seed


def test_kills_one_after_the_other_under_load(database, topics, processes, tmp_path):
    topics.create_families()
    seed = seed_of_this_run()
    chaos = Chaos(seed, database, topics, processes, tmp_path)
    chaos.run([Fault.AT_A_POINT, Fault.AT_A_POINT, Fault.AT_RANDOM, Fault.AT_A_POINT, Fault.AT_A_POINT,
               Fault.AT_RANDOM, Fault.AT_A_POINT])  # fmt: skip
    assert chaos.kills == 7
    assert set(chaos.struck()) == set(POINTS)


@pytest.mark.faults_long
@pytest.mark.timeout(2_400)
def test_a_hundred_kills_zombies_and_crashes_of_both_servers(tmp_path):
    seed = seed_of_this_run()
    faults = (
        [Fault.AT_A_POINT] * 70
        + [Fault.AT_RANDOM] * 16
        + [Fault.ZOMBIE] * 10
        + [Fault.BROKER] * 8
        + [Fault.POSTGRES] * 6
    )
    random.Random(seed).shuffle(faults)
    broker = local.start_kafka(tmp_path / "kafka")
    server = CrashingServer(tmp_path / "postgres")
    processes = None
    try:
        database = server.database()
        topics = TestTopics(Kafka(broker.bootstrap_servers), "chaos.")
        topics.create_families()
        processes = Processes(
            tmp_path,
            {
                "DATABASE_URL": database.url,
                "KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
                "AFLUENTE_TOPIC_PREFIX": topics.prefix,
                "LOG_FORMAT": "json",
            },
        )
        chaos = Chaos(seed, database, topics, processes, tmp_path, broker=broker, server=server)
        try:
            records = chaos.run(faults)
        finally:
            chaos.load.stop()
        again = given_out_again(database, chaos.aborted)
        print(f"{len(records)} records, {chaos.kills} SIGKILLs, {again} transaction ids given out again")
        print(f"struck: {chaos.struck()}, stopped: {chaos.struck('STOP')}")
        assert chaos.kills == 100
        assert set(chaos.struck()) == set(POINTS)
        assert again > 0
    finally:
        if processes is not None:
            processes.stop()
        broker.kill()
        server.postgres.remove()


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5, id="short"),
        pytest.param(60, id="long", marks=[pytest.mark.faults_long, pytest.mark.timeout(180)]),
    ],
)
def test_two_under_a_restarter_change_hands_at_most_once(seconds, database, topics, processes):
    """One is killed once. The other takes over, and the one that is started again stands by, for good."""
    topics.create_families()
    writers, reader = Writers(database), Reader(topics)
    over, started, one_at_a_time = threading.Event(), [[], []], threading.Lock()

    def restarter(own):
        while not over.is_set():
            with one_at_a_time:
                own.append(processes.start("relay", "run"))
            ended = own[-1]
            while not over.wait(0.02) and ended.returncode is None:
                pass

    threads = [threading.Thread(target=restarter, args=(own,)) for own in started]
    for thread in threads:
        thread.start()
    try:
        looking = threading.Event()
        while not (ready := [p for own in started for p in own if p.events("relay.ready")]):
            looking.wait(0.05)
        (first,) = ready
        first.kill()
        count = 0
        for _ in range(seconds * 5):
            writers.commit(2, writers.organizations[count % 4])
            count += 2
            looking.wait(0.2)
        reader.wait_for(count)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    everyone = [process for own in started for process in own]
    assert len(everyone) == 3
    owners = {line["instance"] for process in everyone for line in process.events("relay.ready")}
    assert len(owners) == 2
    assert database.execute("SELECT takeovers FROM afluente.relay_lane") == [(1,)]
    assert [process.terminate() for process in everyone if process is not first] == [0, 0]
    assert_exactly_once_in_order(database, reader.read_to_the_end())
    reader.close()


def owner_of(database):
    rows = database.execute("SELECT instance FROM afluente.relay_lane WHERE instance IS NOT NULL")
    return rows[0][0] if rows else ""
