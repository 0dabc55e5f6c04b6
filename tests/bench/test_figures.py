"""What runs become: medians, ratios round by round, and nothing for what was not run."""

import pytest

from bench.drain import Drain
from bench.relay import figures_of
from bench.report import judged


def drain(peer, rows_per_s, cpu_us=10.0, rss_mb=90.0):
    return Drain(peer, 1_000, 1_000 / rows_per_s, rows_per_s, cpu_us, rss_mb, 0.1, 0.1, 500.0)


def test_a_ratio_is_the_median_of_its_rounds_and_not_that_of_the_medians():
    figures = figures_of(
        [
            drain("relay", 100), drain("debezium", 20),
            drain("relay", 40), drain("debezium", 10),
            drain("relay", 90), drain("debezium", 30),
        ]
    )  # fmt: skip
    assert figures["rows_per_s"] == 90
    assert figures["drain_vs_debezium"] == pytest.approx(4)


def test_memory_is_that_of_the_worst_run():
    assert figures_of([drain("relay", 1, rss_mb=80), drain("relay", 1, rss_mb=130)])["rss_mb"] == 130


def test_a_peer_that_was_not_run_has_no_figure():
    assert not [name for name in figures_of([drain("relay", 1)]) if "debezium" in name]


def test_a_figure_is_held_against_its_target():
    found = {row["figure"]: row["reached"] for row in judged({"drain_vs_debezium": 4.0, "rss_mb": 121, "other": 1})}
    assert found == {"drain_vs_debezium": True, "rss_mb": False, "other": None}
