"""What processes cost: CPU seconds and peak memory, and the machine that they ran on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its threads included."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of all it started, those that have ended included (it has waited for them)."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent = child.cpu_times()
            total += spent.user + spent.system
    return float(total)


def peak_rss_mb(pid: int) -> float:
    """The most memory that a running process has held so far, in MB of 10**6 bytes."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return float(psutil.Process(pid).memory_info().rss) / 1e6  # not Linux: the most is not kept, so what it is now


def machine() -> dict[str, Any]:
    """What a figure has to be read with."""
    model = platform.processor()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": model,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(value, 1) for value in psutil.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Of what takes part on our side."""
    import confluent_kafka
    import psycopg

    return {
        "afluente": version("afluente"),
        "python": platform.python_version(),
        "librdkafka": confluent_kafka.libversion()[0],
        "confluent-kafka": version("confluent-kafka"),
        "psycopg": version("psycopg"),
        "libpq": str(psycopg.pq.version()),
    }
