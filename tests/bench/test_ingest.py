"""The bench of ingest: a tiny run with its own checks, what its runs become, and wrong words."""

import json

import pytest
from typer.testing import CliRunner

from afluente.cli.bench import app
from bench.errors import BenchError
from bench.ingest import receiver_figures
from bench.ingest_normalise import payloads
from bench.ingest_posts import Address, posts, requests
from bench.ingest_receiver import Load, Run, check
from bench.report import judged


def run(peer, per_s, p99_ms=10.0, cpu_us=300.0):
    return Run(peer, 32, 1_000, 1_000 / per_s, per_s, 5.0, p99_ms, 20.0, cpu_us, 100.0, 80.0)


def test_a_ratio_is_that_of_its_round_whoever_began():
    figures = receiver_figures(
        [
            run("afluente", 100, p99_ms=30), run("bare", 200, p99_ms=20),
            run("bare", 100, p99_ms=10), run("afluente", 90, p99_ms=10),
            run("afluente", 240, p99_ms=50, cpu_us=100), run("bare", 300, p99_ms=25),
        ]
    )  # fmt: skip
    assert figures == {
        "receiver_vs_bare": 0.8,
        "receiver_p99_ms": 30,
        "receiver_per_s": 100,
        "receiver_p99_vs_bare": 1.5,
        "receiver_cpu_vs_bare": 1,
    }
    reached = {row["figure"]: row["reached"] for row in judged(figures, "ingest")}
    assert (reached["receiver_vs_bare"], reached["receiver_p99_ms"]) == (True, None)


def test_no_two_posts_are_alike():
    of = [Address(source, source, "12345") for source in ("shopify", "stripe", "nuvemshop", "whatsapp")]
    assert len({post.body for post in posts(of, 500)}) == len(set(requests(of, 500))) == 500


def test_every_sender_has_payloads_to_normalise():
    assert len(payloads()) > 30


def test_a_post_without_its_rows_is_refused(database):
    with pytest.raises(BenchError, match=r"answered 3 posts with 200 and stored \(0, 0, 0, 0\)"):
        check(database.url, "afluente", Load(posts=2, warm_up=1, connections=1))


@pytest.mark.timeout(300)
@pytest.mark.faults_long
def test_a_small_run_makes_its_figures(processes, tmp_path):
    small = ["--posts", "200", "--connections", "8", "--deliveries", "100", "--rows", "2000", "--runs", "1"]
    ran = processes.run("bench", "ingest", *small, "--format", "json", "--state-dir", str(tmp_path), timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.iterdir())
    result = json.loads(ran.stdout)
    assert {
        *("receiver_vs_bare", "receiver_p99_ms", "receiver_alone_vs_bare"),
        *("normalise_per_s", "normalise_vs_bare", "normalise_worker_per_s", "import_vs_copy"),
    } <= set(result["figures"])
    assert [(item["peer"], item["posts"]) for item in result["runs"]["receiver"]] == [("afluente", 200), ("bare", 200)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["ingest", "--part", "speed"], "speed"), (["ingest", "--posts", "1"], "--posts")],
)
def test_wrong_words_are_wrong_usage(arguments, said):
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2
    assert said in ran.stderr
