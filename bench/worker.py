"""The bench of the workers: which measurements, in which order, and the figures that come out of them.

A figure is the median of its runs (memory: the worst); a ratio is the median of the ratios round by round, peers
alternating within a round. What was not run has no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from string import ascii_letters

from confluent_kafka.admin import NewTopic

from afluente import kafka
from bench import usage, worker_peers
from bench.report import Result
from bench.rows import EVENT_TYPE
from bench.servers import Servers, started
from bench.worker_fairness import Behind, behind, name_of
from bench.worker_kinds import CallWorker, EffectWorker, FailOnceWorker, SlowWorker
from bench.worker_records import BAD_BODY, ENTITIES, ORGANIZATIONS, PARTITIONS, fill, organizations, rows
from bench.worker_retries import burst
from bench.worker_runs import Ours, Peer, Run, Work, as_row, measure, rounds
from consumers.worker import BACKOFF_S
from schemas.topics import family_of

FAMILY = family_of(EVENT_TYPE)
BATCH = 500
SLOW_SHARE = 20
"""A peer that makes hundreds in a second gets a twentieth of the events: the rate is the same, the evening shorter."""
EXTERNAL_SHARE = 2
BIG_BYTES = 100_000


class Part(StrEnum):
    transactional = "transactional"
    external = "external"
    bad_record = "bad-record"
    memory = "memory"
    fairness = "fairness"
    retry = "retry"


class Against(StrEnum):
    loop = "loop"
    faststream = "faststream"
    spring = "spring"
    parallel = "parallel"


_TRANSACTIONAL = (Against.loop, Against.faststream, Against.spring)


@dataclass(frozen=True)
class Plan:
    """`big_records`: of 100 kB, for the part memory. `behind`: events of one organization before one of another.
    `failures`: at once, for the part retry."""

    folder: Path
    events: int = 100_000
    runs: int = 3
    parts: Sequence[Part] = tuple(Part)
    against: Sequence[Against] = ()
    big_records: int = 3_000
    behind: Sequence[int] = (50_000, 1_000_000)
    failures: int = 10_000
    keep: bool = False


def run(plan: Plan, environment: Mapping[str, str], said: Callable[[str], None]) -> Result:
    """Do all of it on servers of its own. BenchError when a peer, ours included, did not do the work."""
    _prepare(plan, said)
    began = time.monotonic()
    result = Result("worker", usage.machine(), usage.versions(), _settings(plan))
    with started(plan.folder, environment, logical=False, keep=plan.keep) as servers:
        result.versions |= servers.versions() | worker_peers.versions(peer.value for peer in plan.against)
        for part, measured in (
            (Part.transactional, _transactional),
            (Part.external, _external),
            (Part.bad_record, _bad_record),
            (Part.memory, _memory),
            (Part.fairness, _fairness),
            (Part.retry, _retry),
        ):
            if part in plan.parts:
                measured(plan, servers, result, said)
    result.took_s = round(time.monotonic() - began, 1)
    result.figures = {name: float(f"{value:.4g}") for name, value in result.figures.items()}
    return result


def _prepare(plan: Plan, said: Callable[[str], None]) -> None:
    for peer, parts, prepare in (
        (Against.faststream, {Part.transactional}, worker_peers.build_faststream),
        (Against.spring, {Part.transactional}, lambda: worker_peers.build_java("spring")),
        (Against.parallel, {Part.external}, lambda: worker_peers.build_java("parallel")),
    ):
        if peer in plan.against and parts & set(plan.parts):
            said(f"fetching and building the peer {peer}, if it is not there")
            prepare()


def _transactional(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    ours = Ours(EffectWorker)
    with _events(servers, "tx.", [ours], plan.events, said) as work, _topic(servers, "slow.message") as slow_topic:
        slow = Work("slow.", slow_topic, max(BATCH, plan.events // SLOW_SHARE))
        contenders: list[tuple[Peer, Work]] = [(ours, work)]
        if Against.loop in plan.against:
            contenders.append((worker_peers.LOOP, work))
        if Against.spring in plan.against:
            forms = (worker_peers.SPRING_1, worker_peers.SPRING, worker_peers.SPRING_UNNEST)
            contenders += [(form, work) for form in forms]
        if Against.faststream in plan.against:
            fill(servers.settings(), slow.topic, rows(slow.events, organizations()))
            contenders.append((worker_peers.FASTSTREAM, slow))
        found = _rounds(plan, servers, contenders, Part.transactional, said)
    result.runs[Part.transactional] = [as_row(item) for item in found]
    result.figures |= transactional_figures(found)


def transactional_figures(found: Sequence[Run]) -> dict[str, float]:
    """Ours, and our rate by each peer's of the same round: Spring's is that of its better form with three threads."""
    ours = _of(found, "afluente")
    figures = {
        "transactional_per_s": median(item.per_s for item in ours),
        "transactional_cpu_s_per_100k": median(item.cpu_s_per_100k for item in ours),
        "rss_mb": max(item.rss_mb for item in ours),
    }
    for peer, theirs in _others(found).items():
        if peer == "spring_unnest":
            continue
        best = [item.per_s for item in theirs]
        if peer == "spring":
            others = _of(found, "spring_unnest")
            best = [max(one, other.per_s) for one, other in zip(best, others or theirs, strict=True)]
        figures[f"transactional_vs_{peer}"] = median(mine.per_s / its for mine, its in zip(ours, best, strict=True))
    return figures


def _external(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    ours, events = Ours(CallWorker), plan.events // EXTERNAL_SHARE
    with _events(servers, "ext.", [ours], events, said) as work, _topic(servers, "parallel.message") as topic:
        contenders: list[tuple[Peer, Work]] = [(ours, work)]
        if Against.parallel in plan.against:
            # It orders by the record's key only; under ours, the organization, no more than 200 would be in flight.
            fill(servers.settings(), topic, rows(events, organizations()), by_entity=True)
            by_entity = Work("parallel.", topic, events)
            contenders += [(worker_peers.PARALLEL_200, by_entity), (worker_peers.PARALLEL_400, by_entity)]
        found = _rounds(plan, servers, contenders, Part.external, said)
    result.runs[Part.external] = [as_row(item) for item in found]
    result.figures |= external_figures(found)


def external_figures(found: Sequence[Run]) -> dict[str, float]:
    """Ours, and our rate and CPU by those of the Parallel Consumer: with as many in flight, and with 200."""
    ours = _of(found, "afluente")
    figures = {
        "external_per_s": median(item.per_s for item in ours),
        "external_cpu_s_per_100k": median(item.cpu_s_per_100k for item in ours),
        "external_rss_mb": max(item.rss_mb for item in ours),
    }
    for peer, theirs in _others(found).items():
        name = {"parallel_400": "parallel_consumer", "parallel_200": "parallel_consumer_200"}.get(peer, peer)
        pairs = list(zip(ours, theirs, strict=True))
        figures[f"external_vs_{name}"] = median(mine.per_s / its.per_s for mine, its in pairs)
        figures[f"external_cpu_vs_{name}"] = median(mine.cpu_s_per_100k / its.cpu_s_per_100k for mine, its in pairs)
    return figures


def _bad_record(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    """One organization on one partition, so that batches are 500 records in a row; in the bad runs each has one of the
    bad, which its table refuses."""
    ours = Ours(EffectWorker)
    events = max(2 * BATCH, plan.events // 2 // BATCH * BATCH)
    found: dict[str, list[Run]] = {"clean": [], "bad": []}
    for number in range(plan.runs + 1):
        for case, bad in (("clean", 0), ("bad", events // BATCH)):
            prefix = f"{case}{number}."
            with servers.topics(prefix, [ours.worker], FAMILY) as topics:
                body = (lambda place: BAD_BODY if place % BATCH == BATCH // 2 else None) if bad else None
                topic = topics.event(EVENT_TYPE)
                one = organizations(1, partition=0)
                fill(servers.settings(), topic, rows(events, one, body=body))
                item = measure(servers, ours, Work(prefix, topic, events, bad), f"{case}_record_{number}")
            if number:  # the first of each is for warming up
                found[case].append(item)
                said(f"{Part.bad_record} {number}/{plan.runs} {case}: {item.per_s:,.0f}/s")
    result.runs[Part.bad_record] = [{"case": case, **as_row(item)} for case, items in found.items() for item in items]
    result.figures["bad_record_batch_cost"] = median(
        clean.per_s / bad.per_s for clean, bad in zip(found["clean"], found["bad"], strict=True)
    )


def _memory(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    """Records of 100 kB, far more of them than may be in memory, behind a handler that takes a second."""
    ours = Ours(SlowWorker)
    chance = Random("text")
    texts = ["".join(chance.choices(ascii_letters, k=BIG_BYTES)) for _ in range(4)]
    said(f"writing {plan.big_records:,} records of {BIG_BYTES // 1000} kB")
    with servers.topics("big.", [ours.worker], FAMILY) as topics:
        topic = topics.event(EVENT_TYPE)
        big = rows(plan.big_records, organizations(), body=lambda place: texts[place % len(texts)])
        fill(servers.settings(), topic, big)
        found = measure(servers, ours, Work("big.", topic, plan.big_records), "big_records")
    result.runs[Part.memory] = [as_row(found)]
    result.figures["rss_mb_100kb"] = found.rss_mb
    said(f"{Part.memory}: {found.rss_mb:.0f} MB at {found.per_s:,.0f}/s")


def _fairness(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    """All on one partition: many of one organization, then one of another. Both kinds of worker; the slower counts."""
    many, few = organizations(2, partition=0)
    kinds = [Ours(EffectWorker, "transactional"), Ours(CallWorker, "external")]
    found: list[Behind] = []
    for count in plan.behind:
        said(f"writing {count:,} events of one organization and one of another")
        prefix = f"behind{count}."
        with servers.topics(prefix, [ours.worker for ours in kinds], FAMILY) as topics:
            topic = topics.event(EVENT_TYPE)
            fill(servers.settings(), topic, chain(rows(count, [many]), rows(1, [few], first=count)))
            for number in range(1, (plan.runs if count <= 100_000 else 1) + 1):
                for ours in kinds:
                    work = Work(prefix, topic, count + 1)
                    item = behind(servers, ours, work, few, f"behind{count}_{ours.name}_{number}")
                    found.append(item)
                    said(
                        f"{Part.fairness} {number} {ours.name}: {item.delay_s:.2f} s behind {count:,}, "
                        f"{item.rss_mb:.0f} MB, {item.effects_before:,} of the others before it"
                    )
    result.runs[Part.fairness] = [item.as_row() for item in found]
    result.figures |= fairness_figures(found)


def fairness_figures(found: Sequence[Behind]) -> dict[str, float]:
    """For each number the median of the kind of worker that is slower, and the most memory."""
    figures: dict[str, float] = {}
    for count in dict.fromkeys(item.behind for item in found):
        of_kind = [
            [item.delay_s for item in found if item.behind == count and item.worker == worker]
            for worker in dict.fromkeys(item.worker for item in found)
        ]
        figures[f"small_tenant_delay_s_{name_of(count)}"] = max(median(delays) for delays in of_kind if delays)
        figures[f"rss_mb_behind_{name_of(count)}"] = max(item.rss_mb for item in found if item.behind == count)
    return figures


def _retry(plan: Plan, servers: Servers, result: Result, said: Callable[[str], None]) -> None:
    ours = Ours(FailOnceWorker)
    said(f"writing {plan.failures:,} events that fail once; they come back in {BACKOFF_S[0]} s and more")
    with servers.topics("retry.", [ours.worker], FAMILY) as topics:
        topic = topics.event(EVENT_TYPE)
        fill(servers.settings(), topic, rows(plan.failures, organizations()))
        found = burst(servers, ours, Work("retry.", topic, plan.failures), BACKOFF_S[0], "retries")
    result.runs[Part.retry] = [found.as_row()]
    result.figures |= {"retry_late_s_max": found.late_s_max, "retry_peak_share": found.peak_share}
    said(f"{Part.retry}: late by {found.late_s_p50:.2f} s, at most {found.late_s_max:.2f} s")


def _rounds(
    plan: Plan, servers: Servers, contenders: Sequence[tuple[Peer, Work]], part: Part, said: Callable[[str], None]
) -> list[Run]:
    said("warming the servers up")
    measure(servers, *contenders[0], f"{part}_warm_up")
    return rounds(servers, contenders, part, plan.runs, said)


@contextmanager
def _events(
    servers: Servers, prefix: str, ours: Sequence[Ours], count: int, said: Callable[[str], None]
) -> Iterator[Work]:
    """The topics under `prefix` with `count` events of 200 organizations."""
    with servers.topics(prefix, [each.worker for each in ours], FAMILY) as topics:
        said(f"writing {count:,} events")
        topic = topics.event(EVENT_TYPE)
        fill(servers.settings(), topic, rows(count, organizations()))
        yield Work(prefix, topic, count)


@contextmanager
def _topic(servers: Servers, name: str) -> Iterator[str]:
    """A topic that is nobody's but a peer's."""
    admin = kafka.admin(servers.settings())
    with ExitStack() as gone:
        for future in admin.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
            future.result(30)
        gone.callback(lambda: [future.result(30) for future in admin.delete_topics([name]).values()])
        yield name


def _of(found: Sequence[Run], peer: str) -> list[Run]:
    return [item for item in found if item.peer == peer]


def _others(found: Sequence[Run]) -> dict[str, list[Run]]:
    return {name: _of(found, name) for name in dict.fromkeys(item.peer for item in found) if name != "afluente"}


def _settings(plan: Plan) -> dict[str, object]:
    return {
        "events": plan.events,
        "events_external": plan.events // EXTERNAL_SHARE,
        "events_faststream": max(BATCH, plan.events // SLOW_SHARE),
        "runs": plan.runs,
        "organizations": ORGANIZATIONS,
        "entities": ENTITIES,
        "partitions": PARTITIONS,
        "batch": BATCH,
        "in_flight": CallWorker.policy.concurrency,
        "big_records": plan.big_records,
        "behind": list(plan.behind),
        "failures": plan.failures,
        "parts": [part.value for part in plan.parts],
        "against": [peer.value for peer in plan.against],
        "postgres_durable": True,
    }
