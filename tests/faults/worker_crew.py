"""Members of the same workers that come, die and freeze, and what must be true of their deliveries in the end.

`Crew` disturbs and remembers when. `Story` emits the events, whose bodies say how each delivery goes, so that state and
attempts of every row are known before anything runs; at the end it compares.
"""

import random
import signal
import time
from collections import Counter, defaultdict
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from threading import Event, Lock, Thread
from typing import NamedTuple

import schemas
from afluente.local.processes import NotSeen
from schemas.topics import partition_of
from tests.consumers.runtime.support import MESSAGE, ROOT, lag, produce, row, short_sessions, until
from tests.faults import worker_members
from tests.faults.worker_members import ATTEMPTS

MODULE = "tests.faults.worker_members"
PARTITIONS = 5
SCALE = 0.01  # tiers of 0.3, 0.6 and 1.2 s
SESSION_S = {"consumer": 3.0, "classic": 6.0}
TAKEOVER_S = 3.0
LATE_S = 1.0
IDLE_S = 2.0  # a worker with something due that runs nothing for so long stands still
BACKOFF_MS = [1000 * SCALE * seconds for seconds in worker_members.POLICY.backoff_s]


class Run(NamedTuple):
    what: str
    worker: str
    event: str
    target: str
    attempt: int
    ms: float
    pid: int


def runs_in(path):
    """Every line that the members noted."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        what, worker, event, target, attempt, ms, pid = line.split()
        found.append(Run(what, worker, event, "" if target == "-" else target, int(attempt), float(ms), int(pid)))
    return found


class Crew:
    """Members by number, each a process that runs all of `workers`."""

    def __init__(self, processes, topics, folder: Path, *, protocol="consumer", workers=worker_members.ALL, env=None):
        self.runs = folder / "runs"
        self.protocol = protocol
        self.members = []
        self.done = Counter()
        """How often each disturbance was made."""
        self.disturbed = {}
        """When each process that was killed or stopped was last touched (ms)."""
        self.moments = []
        """When anything at all was done to the group (ms)."""
        self._processes = processes
        self._names = [f"{MODULE}:{worker.__name__}" for worker in workers]
        self._env = {
            "PYTHONPATH": ROOT,
            "RUNS": self.runs,
            "AFLUENTE_GROUP_PROTOCOL": protocol,
            "AFLUENTE_BACKOFF_SCALE": SCALE,
            "AFLUENTE_CLAIM_TAKEOVER_S": TAKEOVER_S,
            "AFLUENTE_CLAIM_RENEW_S": "0.5",
        } | (env or {})
        short_sessions(topics, *(worker.name for worker in workers))

    def join(self, **env):
        member = self._processes.start("worker", "run", *self._names, env=self._env | env)
        self.members.append(member)
        self._touched(None, "join")
        return member

    def kill(self, member):
        self._touched(member, "kill")
        self.members.remove(member)
        assert member.kill() == -signal.SIGKILL, member.tail()

    def fell(self, member):
        """It has killed itself, at a point it was told."""
        self._touched(member, "kill")
        self.members.remove(member)

    def leave(self, member):
        """SIGTERM, and gone when this returns, with nothing handed back."""
        self.members.remove(member)
        self.moments.append(time.time_ns() / 1e6)
        self.end(member)
        self._touched(None, "leave")

    def end(self, member):
        """SIGTERM, and 0 as its exit status."""
        try:
            status = member.terminate(timeout=60)
        except NotSeen:
            member.signal(signal.SIGUSR1)
            raise AssertionError(f"does not end: {member.tail()}") from None
        assert status == 0, member.tail()

    def freeze(self, member):
        self._touched(member, "stop")
        member.signal(signal.SIGSTOP)

    def thaw(self, member):
        member.signal(signal.SIGCONT)
        self._touched(member, "cont")

    def wait_for_heirs(self, frozen, timeout=30.0):
        """Wait until its session is over and others have been given its partitions."""
        others = [member for member in self.members if member is not frozen]

        def assignments():
            return sum(len(member.events("worker.assigned")) for member in others)

        before = assignments()
        until(lambda: assignments() > before, timeout)

    def lines(self):
        """How much has been noted: grows with every run of a handler."""
        return self.runs.stat().st_size if self.runs.exists() else 0

    def go_on(self, runs, since=None, timeout=60.0):
        """Wait until about so many more handlers have run than there were at `since` (default: now; `lines` before
        their events came, when no others come: they may have run by now), whoever ran them."""
        goal = (self.lines() if since is None else since) + runs * 110
        until(lambda: self.lines() >= goal, timeout)

    def explained(self, at):
        """Until when what was done to the group around this moment may hold a delivery up (ms), at least `at`."""
        window = 1000 * (SESSION_S[self.protocol] + TAKEOVER_S + 6)  # missed, given up, taken over, rebalanced
        for moment in sorted(self.moments):
            if moment <= at:
                at = max(at, moment + window)
        return at

    def _touched(self, member, what):
        now = time.time_ns() / 1e6
        self.done[what] += 1
        self.moments.append(now)
        if member is not None:
            self.disturbed[member.pid] = now


class Story:
    """Events of one topic, and how their deliveries must end."""

    def __init__(self, database, topics, seed, *, workers=worker_members.ALL):
        self.chance = random.Random(seed)
        self.rows = []
        self.bodies = {}
        self._database = database
        self._topics = topics
        self._workers = workers
        self._emitting = Lock()  # the order of the rows is that of the topic
        found = {}
        while len(found) < 6 or {partition_of(o, PARTITIONS) for o in found} != set(range(PARTITIONS)):
            found[database.organization(f"o{len(found)}")] = True
        self._organizations = list(found)
        names = [topics.event("message.received")]
        for worker in workers:
            names += [*topics.retries(worker.name), topics.dead_letter(worker.name)]
        topics.create(*names, partitions=PARTITIONS)

    def emit(self, count, bodies=None):
        """Put so many events on the topic: of 12 keys for each organization, one in six of them failing somehow."""
        some = []
        for _ in range(count):
            body = bodies or self.chance.choices(["ok", "fail 1", "fail 2", "dead", "reject"], [50, 6, 2, 1, 1])[0]
            organization = self.chance.choice(self._organizations)
            key = f"{organization}-{self.chance.randrange(12)}"
            if body == "ok" and self.chance.random() < 0.5:
                key = f"{organization}-calm{self.chance.randrange(6)}"  # of such keys nothing ever fails
            event = row(organization, payload=MESSAGE | {"conversation_id": key, "body": body})
            some.append(event)
            self.bodies[event.id] = body
        with self._emitting:
            self.rows += produce(self._topics, some)
            # and some records a second time, as an emitter that was not sure, or a replay, brings them
            produce(self._topics, self.chance.sample(self.rows, k=min(20, len(self.rows) // 40)))
        return some

    def expected(self):
        """(worker, event, target) -> (state, attempts)"""
        ends = {"ok": ("done", 1), "fail 1": ("done", 2), "fail 2": ("done", 3)}
        ends |= {"dead": ("dead", ATTEMPTS), "reject": ("dead", 1)}
        return {
            (worker.name, event.id, target): ends[self.bodies[event.id]]
            for worker in self._workers
            for event in self.rows
            for target in (("a", "b") if worker is worker_members.Caller else ("",))
        }

    def found(self):
        rows = self._database.execute("SELECT worker, event_id, target, state, attempts FROM event_delivery")
        return {(worker, event, target): (state, attempts) for worker, event, target, state, attempts in rows}

    def wait_until_over(self, timeout=120.0):
        """Every delivery is where it must end, and every topic is read to its end."""
        expected = self.expected()
        try:
            until(lambda: self.found() == expected, timeout)
        except AssertionError:
            found = self.found()
            wrong = {key: (found.get(key), end) for key, end in expected.items() if found.get(key) != end}
            worker, event, target = next(iter(wrong))
            raise AssertionError(
                f"{len(wrong)} of {len(expected)} deliveries: {list(wrong.items())[:10]}; of the first one's key: "
                f"{self._of_its_key(worker, event, target)}"
            ) from None
        for worker in self._workers:
            names = [self._topics.event("message.received"), *self._topics.retries(worker.name)]
            until(lambda worker=worker, names=names: lag(self._topics, worker.name, names) == 0, 30)

    def _of(self, worker, event):
        [found] = self._database.execute(
            "SELECT claim, attempts, origin_topic, block_order, updated_at::text FROM event_delivery"
            " WHERE worker = %s AND event_id = %s",
            [worker, event],
        )
        return found

    def _of_its_key(self, worker, event, target):
        return self._database.execute(
            """
            SELECT d.event_id::text, d.target, d.state, d.attempts, d.claim, d.claimed_by::text, p.renewed_at::text,
                   d.next_attempt_at::text, d.kept_value IS NOT NULL AS kept, d.block_order, d.updated_at::text
              FROM event_delivery d
              LEFT JOIN worker_process p ON p.id = d.claimed_by
             WHERE (d.worker, d.key) = (SELECT worker, key FROM event_delivery
                                         WHERE worker = %s AND event_id = %s AND target = %s LIMIT 1)
             ORDER BY d.block_order NULLS FIRST, d.updated_at
            """,
            [worker, event, target],
        )

    def check(self, crew, *others):
        """One effect each; runs and attempts as told; order within keys; delays; dead letters."""
        for other in others:
            crew.disturbed |= other.disturbed
            crew.moments += other.moments
        expected, runs = self.expected(), runs_in(crew.runs)
        self._check_effects(expected)
        self._check_order(runs, crew)
        self._check_runs(expected, runs, crew)
        self._check_delays(runs, crew)
        self._check_dead_letters(expected)

    def _check_effects(self, expected):
        rows = self._database.execute("SELECT worker, event_id, target, attempt FROM effect")
        effects = Counter((worker, event, target) for worker, event, target, _ in rows)
        once = {key: 1 for key, (state, _) in expected.items() if state == "done"}
        wrong = [(key, effects[key]) for key in effects.keys() | once.keys() if effects[key] != once.get(key)]
        assert wrong == [], wrong[:5]
        assert all(expected[worker, event, target][1] == attempt for worker, event, target, attempt in rows)

    def _check_order(self, runs, crew):
        """With ordering by key: as emitted, whatever failed. Without: as emitted where nothing of the key ever failed,
        for effects in Postgres alone (a call of a frozen process is passed by those behind it)."""
        emitted = {event.id: number for number, event in enumerate(self.rows)}
        rows = self._database.execute("SELECT worker, key, event_id FROM effect ORDER BY number")
        by_key = defaultdict(list)
        for worker, key, event in rows:
            by_key[worker, key].append(emitted[event])
        wrong = {}
        for (worker, key), order in by_key.items():
            strict = worker.startswith("strict") or (worker == "writer-worker" and "calm" in key)
            if strict and order != sorted(order):
                begun = {run.event: run for run in runs if run.what == "begin" and run.worker == worker}
                wrong[worker, key] = [
                    (number, self.bodies[event], *self._of(worker, event), begun[str(event)])
                    for number in order
                    if (event := self.rows[number].id)
                ]
        if wrong:
            print(f"disturbed: {sorted(crew.disturbed.items(), key=itemgetter(1))}")
        assert wrong == {}, "\n".join(f"{key}: {line}" for key, lines in wrong.items() for line in lines)

    def _check_runs(self, expected, runs, crew):
        """Each attempt from the first to the last ran, none beyond; a call was repeated only where its process was
        killed or frozen."""
        begun = defaultdict(list)
        for run in runs:
            if run.what == "begin":
                begun[run.worker, run.event, run.target, run.attempt].append(run)
        attempts = defaultdict(set)
        for worker, event, target, attempt in begun:
            attempts[worker, event, target].add(attempt)
        wrong = [
            (delivery, last, ran)
            for delivery, (_, last) in expected.items()
            if (ran := attempts.pop((delivery[0], str(delivery[1]), delivery[2]), set())) != set(range(1, last + 1))
        ]
        assert wrong == [], wrong[:5]
        assert not attempts, list(attempts.items())[:5]
        repeated = [of for of in begun.values() if len(of) > 1 and "caller" in of[0].worker]
        # the one that died in it, or woke up too late to know that it was taken over; of the others only one
        unexplained = [of for of in repeated if sum(run.pid not in crew.disturbed for run in of) > 1]
        assert unexplained == [], unexplained[:3]
        crew.done["repeated calls"] = len(repeated)

    def _check_delays(self, runs, crew):
        """No attempt before it was due; the waits are those of the policy; none late by more than a second, but for
        what was done to the group, and for members that were busy all the time with others of the same worker."""
        first, last = {}, {}
        at_work = defaultdict(list)
        for run in runs:
            if run.what == "begin":
                key = run.worker, run.event, run.target, run.attempt
                first.setdefault(key, run.ms)
                last[key] = run.ms
                at_work[run.worker].append(run.ms)
        for moments in at_work.values():
            moments.sort()
        due = self._due()
        wanted = {key for key in first if key[3] > 1}
        assert wanted <= set(due), sorted(wanted - set(due))[:3]
        early, late, short, waits = [], [], [], []
        for key in wanted:
            [at] = due[key]  # whoever produced the record, once or twice, said the same
            worker, event, target, attempt = key
            if first[key] < at:
                early.append((key, at - first[key]))
            by = first[key] - crew.explained(at)
            if by > LATE_S * 1000 and _longest_gap(at_work[worker], first[key] - by, first[key]) > IDLE_S * 1000:
                late.append((by, key))
            failed = worker, event, target, attempt - 1
            base_ms = BACKOFF_MS[attempt - 2]
            if at - first[failed] < base_ms - 1:
                short.append((key, at - first[failed], base_ms))
            waits.append(
                at - last[failed] - 1.3 * base_ms
            )  # beyond the jitter: from the handler's begin to its outcome
        assert early == [], early[:5]
        assert short == [], short[:5]
        assert late == [], sorted(late)[-5:]
        assert not waits or median(waits) <= LATE_S * 1000, median(waits)

    def _due(self):
        """(worker, event, target, attempt) -> the due times that retry records gave it, ms"""
        due = defaultdict(set)
        for worker in self._workers:
            for topic in self._topics.retries(worker.name):
                for record in self._topics.records(topic):
                    headers = {name: (value or b"").decode() for name, value in record.headers()}
                    key = worker.name, headers["x-event-id"], headers["x-target"], int(headers["x-attempt"])
                    due[key].add(int(headers["x-due-ms"]))
        return due

    def lateness(self, crew, rows):
        """How late each attempt after the first one of these events was, ms."""
        events, due = {str(event.id) for event in rows}, self._due()
        return [
            run.ms - max(due[key])
            for run in runs_in(crew.runs)
            if run.event in events and run.attempt > 1 and run.what == "begin"
            if (key := (run.worker, run.event, run.target, run.attempt))
        ]

    def _check_dead_letters(self, expected):
        for worker in self._workers:
            letters = self._topics.records(self._topics.dead_letter(worker.name))
            found = set()
            for letter in letters:
                headers = dict(letter.headers())
                event = schemas.decode(letter.value())
                assert headers["x-event-id"].decode() == str(event.id)
                found.add((worker.name, event.id, headers["x-target"].decode()))
            assert found == {k for k, (state, _) in expected.items() if state == "dead" and k[0] == worker.name}


class Load:
    """Events, a few at a time, until it is stopped."""

    def __init__(self, story):
        self._story = story
        self._stop = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(0.1):
            self._story.emit(5)

    def stop(self):
        self._stop.set()
        self._thread.join()


def _longest_gap(moments, begin, end):
    """The longest time between two of these moments, ascending, from `begin` to `end`."""
    stretch = [begin, *(moment for moment in moments if begin <= moment <= end), end]
    return max(later - earlier for earlier, later in pairwise(stretch))
