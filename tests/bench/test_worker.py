"""The bench of the workers: a tiny run with its own check, what its runs become, and wrong words."""

import json

import psycopg
import pytest
from typer.testing import CliRunner

from afluente.cli.bench import app
from bench.errors import BenchError
from bench.load import LagClock, is_well
from bench.load import Plan as LoadPlan
from bench.load import figures_of as load_figures
from bench.report import judged
from bench.worker import external_figures, fairness_figures, transactional_figures
from bench.worker_effects import check, make
from bench.worker_fairness import Behind, name_of
from bench.worker_retries import peak
from bench.worker_runs import Run


def run(peer, per_s, cpu_s=1.0, rss_mb=80.0):
    return Run(peer, 1_000, 1_000 / per_s, per_s, per_s, 500.0, cpu_s, rss_mb, 0.1, 0.1)


def test_a_ratio_is_that_of_its_round_and_spring_counts_by_its_better_form():
    figures = transactional_figures(
        [
            run("afluente", 100), run("loop", 200), run("spring", 50), run("spring_unnest", 25),
            run("afluente", 60, rss_mb=95), run("loop", 240), run("spring", 20), run("spring_unnest", 30),
            run("afluente", 90), run("loop", 90), run("spring", 90), run("spring_unnest", 10),
        ]
    )  # fmt: skip
    assert figures == {
        "transactional_per_s": 90,
        "transactional_cpu_s_per_100k": 1,
        "rss_mb": 95,
        "transactional_vs_loop": 0.5,
        "transactional_vs_spring": 2,
    }


def test_cpu_is_compared_with_the_parallel_consumer_with_as_many_in_flight():
    figures = external_figures(
        [run("afluente", 9_000, cpu_s=3), run("parallel_200", 6_000, cpu_s=8), run("parallel_400", 4_500, cpu_s=12)]
    )
    assert figures["external_cpu_vs_parallel_consumer"] == 0.25
    assert figures["external_vs_parallel_consumer"] == 2
    assert figures["external_cpu_vs_parallel_consumer_200"] == 0.375


def test_fairness_is_that_of_the_slower_kind_of_worker():
    found = [Behind("transactional", 50_000, delay, 1, 80.0) for delay in (1.0, 9.0, 2.0)]
    found += [Behind("external", 50_000, delay, 1, 90.0) for delay in (3.0, 1.0, 5.0)]
    assert fairness_figures(found) == {"small_tenant_delay_s_50k": 3, "rss_mb_behind_50k": 90}
    assert [name_of(count) for count in (1_000_000, 50_000, 1_500, 300)] == ["1m", "50k", "1500", "300"]


def test_a_peak_is_the_most_within_any_second():
    assert peak([5.0, 1.0, 1.4, 1.9, 2.1]) == 3
    assert peak([3.0]) == 1


def test_a_worker_figure_is_held_against_its_own_target():
    reached = {row["figure"]: row["reached"] for row in judged({"rss_mb": 110, "external_per_s": 9_000}, "worker")}
    assert reached == {"rss_mb": False, "external_per_s": True}


def test_lag_counts_from_the_last_look_without_the_record():
    clock = LagClock()
    assert clock.lag_s(10, end=5, committed=5) == 0
    assert clock.lag_s(11, end=8, committed=5) == 1
    assert clock.lag_s(13, end=9, committed=6) == 3
    assert clock.lag_s(14, end=9, committed=8) == 3  # the record that is left came after the look at 11
    assert clock.lag_s(20, end=9, committed=9) == 0
    assert clock.lag_s(21, end=10, committed=9) == 1


def test_a_load_is_well_without_loss_and_within_its_lag():
    plan = LoadPlan(None, rate=1_200, minutes=1)
    worker = {"lag_s": 2.0, "delay_s_p50": 0.1, "delay_s_p99": 0.2, "missing": 0, "twice": 0}
    assert plan.events == 1_200
    assert is_well(plan, load_figures(plan, 60, [worker, worker]))
    for wrong in ({"lag_s": 30.1}, {"missing": 1}, {"twice": 1}):
        assert not is_well(plan, load_figures(plan, 60, [worker, worker | wrong]))


def test_less_than_the_work_or_twice_some_of_it_is_refused(database):
    make(database.url)
    rows = "INSERT INTO bench_effect (event_id, organization_id, contact_id, body) VALUES (%s, %s, '', 'x')"
    ids = ["00000000-0000-0000-0000-00000000000" + digit for digit in "123"]
    with psycopg.connect(database.url) as conn:
        for event_id in ids[:2]:
            conn.execute(rows, [event_id, ids[0]])
            conn.execute("INSERT INTO bench_inbox (worker, event_id) VALUES ('peer', %s)", [event_id])
        check(conn, "peer", 2, 0, worker=None)
        with pytest.raises(BenchError, match=r"effects: -1, distinct effects: -1, idempotency rows: -1"):
            check(conn, "peer", 3, 0, worker=None)
        conn.execute(rows, [ids[0], ids[0]])
        with pytest.raises(BenchError, match=r"3 events: distinct effects: -1"):
            check(conn, "peer", 3, 0, worker=None)


def bench(processes, tmp_path, *arguments):
    ran = processes.run(
        *("bench", "worker", "--events", "1000", "--runs", "1", "--format", "json", *arguments),
        *("--state-dir", str(tmp_path / "bench"), "--report", str(tmp_path / "report.md")),
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    assert not list((tmp_path / "bench").iterdir())
    assert "# afluente bench worker" in (tmp_path / "report.md").read_text()
    return json.loads(ran.stdout)


@pytest.mark.timeout(300)
@pytest.mark.faults_long
def test_a_small_run_measures_our_worker_alone(processes, tmp_path):
    result = bench(processes, tmp_path, "--part", "transactional")
    assert set(result["figures"]) == {"transactional_per_s", "transactional_cpu_s_per_100k", "rss_mb"}
    assert [(item["peer"], item["events"]) for item in result["runs"]["transactional"]] == [("afluente", 1_000)]


@pytest.mark.faults_long
@pytest.mark.timeout(900)
def test_all_parts_make_their_figures(processes, tmp_path):
    small = ["--behind", "300", "--big-records", "20", "--failures", "100", "--against", "loop"]
    result = bench(processes, tmp_path, *small)
    assert set(result["runs"]) == {"transactional", "external", "bad-record", "memory", "fairness", "retry"}
    assert {
        *("transactional_per_s", "transactional_vs_loop", "external_per_s", "rss_mb", "rss_mb_100kb"),
        *("bad_record_batch_cost", "small_tenant_delay_s_300", "retry_late_s_max"),
    } <= set(result["figures"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "--against", "rabbitmq"], "rabbitmq"),
        (["worker", "--against", "none", "--against", "loop"], "none goes with no other"),
        (["worker", "--part", "speed"], "speed"),
        (["load", "--rate", "1"], "--rate"),
    ],
)
def test_wrong_words_are_wrong_usage(arguments, said):
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2
    assert said in ran.stderr
