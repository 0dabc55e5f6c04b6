"""Members killed at each place where something is half done. After each death: nothing is only in memory.

What is below a committed offset is over, or waits where a crash does not reach: in Postgres with its bytes, or in a
retry topic beyond what is committed there. At the end every delivery has its one effect. Hits are counted.
"""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import TopicPartition

import schemas
from afluente import kafka as clients
from tests.consumers.runtime.support import effect_table, until
from tests.faults.worker_crew import Crew, Story
from tests.faults.worker_members import Caller, StrictCaller, StrictWriter, Writer

POINTS = (
    ("worker.before_claim", 2),
    ("worker.after_claim", 2),
    ("worker.in_handler", 30),
    ("worker.after_call", 20),
    ("worker.after_retry_produced", 3),
    ("worker.after_commit", 2),
    ("worker.before_offset_commit", 2),
    ("worker.in_revoke", 1),
)
EXTERNAL_ONLY = {"worker.after_call"}
# The short run strikes where tests/faults/test_worker_kills.py does not.
SHORT = {"worker.before_claim", "worker.after_call", "worker.in_revoke"}


def committed(topics, worker, topic):
    consumer = clients.consumer(topics.settings, worker)
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        found = consumer.committed([TopicPartition(topic, partition) for partition in partitions], timeout=10)
        return {place.partition: max(place.offset, 0) for place in found}
    finally:
        consumer.close()


def only_in_memory(database, topics, kind):
    """Deliveries of records below the committed offset that nothing would bring back."""
    name, source = kind.name, topics.event("message.received")
    # The offsets first: what becomes durable while we look only makes the rest better.
    marks = committed(topics, name, source)
    below = {
        schemas.decode(record.value()).id
        for record in topics.records(source)
        if record.offset() < marks[record.partition()]
    }
    waiting = set()
    for topic in topics.retries(name):
        marks = committed(topics, name, topic)
        for record in topics.records(topic):
            if record.offset() >= marks[record.partition()]:
                headers = dict(record.headers())
                event, target, attempt = (headers[x] for x in ("x-event-id", "x-target", "x-attempt"))
                waiting.add((event.decode(), target.decode(), int(attempt)))
    rows = database.execute(
        """SELECT event_id, target, state, attempts, kept_value IS NOT NULL FROM event_delivery WHERE worker = %s""",
        [name],
    )
    targets = ("a", "b") if kind is Caller else ("",)
    missing = {(event, target) for event in below for target in targets} - {(row[0], row[1]) for row in rows}
    lost = [
        (event, target, state)
        for event, target, state, attempts, kept in rows
        if event in below and state not in ("done", "dead") and not kept
        if (str(event), target, attempts + 1) not in waiting
    ]
    return sorted(missing) + lost


def hits(log):
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split()[0] for line in lines if line.endswith("KILL")]


def live(kind, points, story, crew, database, topics, log):
    """One worker's life: killed at each of the points, then left to itself. Returns the points hit."""
    for point, at in points:
        story.emit(40)
        victim = crew.join(AFLUENTE_FAULT=f"{point}:{at}", AFLUENTE_FAULT_LOG=log)
        heir = None
        if point == "worker.in_revoke":
            victim.wait_for("worker.delivered", timeout=60)
            heir = crew.join()
        assert victim.wait(90) == -signal.SIGKILL, victim.tail()
        crew.fell(victim)
        if heir is None:
            assert only_in_memory(database, topics, kind) == [], point
        else:  # it works on while we look; what is lost stays lost
            until(lambda: only_in_memory(database, topics, kind) == [], 60)
            crew.leave(heir)
    crew.join()
    return hits(log)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kinds", "protocol", "short"),
    [
        pytest.param((StrictCaller,), "consumer", True, marks=pytest.mark.faults_long),
        pytest.param((Writer, Caller, StrictWriter), "consumer", False, marks=pytest.mark.faults_long),
        pytest.param((StrictWriter, Caller), "classic", False, marks=pytest.mark.faults_long),
    ],
)
def test_killed_at_every_point_nothing_is_only_in_memory(kinds, protocol, short, database, topics, processes, tmp_path):
    effect_table(database)
    story = Story(database, topics, 3, workers=kinds)
    crews = {kind: Crew(processes, topics, tmp_path, protocol=protocol, workers=[kind]) for kind in kinds}
    points = {
        kind: [
            (point, at)
            for point, at in POINTS
            if (point in SHORT or not short) and (point not in EXTERNAL_ONLY or "call" in kind.name)
        ]
        for kind in kinds
    }
    with ThreadPoolExecutor() as pool:
        lives = {
            kind: pool.submit(live, kind, points[kind], story, crews[kind], database, topics, tmp_path / kind.name)
            for kind in kinds
        }
        hit = {kind: life.result(380) for kind, life in lives.items()}
    assert hit == {kind: [point for point, _ in points[kind]] for kind in kinds}
    story.emit(20)
    story.wait_until_over(90)
    story.check(*crews.values())
