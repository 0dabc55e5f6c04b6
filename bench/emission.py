"""What the outbox costs those who write, by pgbench: emit_event against the same INSERT, and with a relay beside.

Both by `afluente_app`, under row level security, each in a transaction of its own, as services would. That role may not
insert into event_log: in the bench's own database it is given the right.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from afluente.local.postgres import program
from bench.errors import BenchError
from bench.rows import BODY, ENTITY_KIND, EVENT_TYPE, add_organizations
from bench.servers import Servers
from producers.relay.status import look

ROLE = "afluente_app"
OFFERED = 0.8
CAUGHT_UP_WITHIN_S = 120.0
_ENTITY = "0193f2a0-5555-7000-8000-000000000005"
_PAYLOAD = json.dumps(
    {
        "direction": "in",
        "conversation_id": "0193f2a0-2222-7000-8000-000000000002",
        "contact_id": "0193f2a0-3333-7000-8000-000000000003",
        "body": BODY,
        "waha_message_id": "false_5519910000000@c.us_3EB0",
        "message_id": "0193f2a0-4444-7000-8000-000000000004",
    },
    ensure_ascii=False,
)
_METADATA = json.dumps({"request_id": "0193f2a0-6666-7000-8000-000000000006", "source": "waha"})
_SCRIPTS = {
    "insert": "BEGIN;\n"
    "INSERT INTO event_log (organization_id, event_type, entity_kind, entity_id, payload, metadata)"
    f" VALUES (:organization, '{EVENT_TYPE}', '{ENTITY_KIND}', '{_ENTITY}', :payload, :inserted);\nCOMMIT;\n",
    "emit": f"BEGIN;\nSELECT emit_event('{EVENT_TYPE}', '{ENTITY_KIND}', '{_ENTITY}', :payload, :metadata);\nCOMMIT;\n",
}


@dataclass(frozen=True)
class Saturated:
    """One run of each, back to back: transactions a second with nothing held back."""

    connections: int
    insert_tps: float
    emit_tps: float


@dataclass(frozen=True)
class Offered:
    """One run without and one with a relay, at 80% of the saturated rate. p99 from BEGIN to COMMIT."""

    connections: int
    offered_tps: float
    off_tps: float
    on_tps: float
    off_p99_ms: float
    on_p99_ms: float
    on_saturated_tps: float


class Writers:
    """pgbench against a database of its own."""

    def __init__(self, servers: Servers, seconds: float) -> None:
        self._servers, self._seconds = servers, seconds
        self.url = servers.database("writers")
        with psycopg.connect(self.url, autocommit=True) as conn:
            self._organization = str(add_organizations(conn, 1)[0])
            conn.execute(f"GRANT INSERT ON event_log TO {ROLE}")
        for name, script in _SCRIPTS.items():
            (servers.folder / f"{name}.sql").write_text(script)

    def saturated(self, connections: int, run: int) -> Saturated:
        # By turns, so that neither always runs on the fuller table.
        names = ("insert", "emit") if run % 2 else ("emit", "insert")
        tps = {name: self._run(name, connections)[0] for name in names}
        return Saturated(connections, tps["insert"], tps["emit"])

    def offered(self, connections: int, saturated_tps: float) -> Offered:
        offered = saturated_tps * OFFERED
        off_tps, off_p99 = self._run("emit", connections, offered)
        prefix = "writers."
        process = self._servers.relay(self.url, prefix, f"relay-writers-{connections}")
        try:
            process.wait_for("relay.ready", timeout=60)
            self._wait_until_published(prefix)
            on_tps, on_p99 = self._run("emit", connections, offered)
            self._wait_until_published(prefix)
            on_saturated, _ = self._run("emit", connections)
            self._wait_until_published(prefix)
        finally:
            process.terminate()
        return Offered(connections, offered, off_tps, on_tps, off_p99, on_p99, on_saturated)

    def _run(self, name: str, connections: int, rate: float | None = None) -> tuple[float, float]:
        """Transactions a second, and the p99 in ms."""
        given = conninfo_to_dict(self.url)
        environment = {
            **self._servers.environment,
            "PGHOST": str(given["host"]),
            "PGPORT": str(given["port"]),
            "PGUSER": str(given["user"]),
            "PGPASSWORD": str(given["password"]),
            "PGDATABASE": str(given["dbname"]),
            "PGOPTIONS": f"-c role={ROLE} -c app.organization_id={self._organization}",
        }
        logs = self._servers.folder / "pgbench"
        command = [
            str(program("pgbench")), "--no-vacuum", "--protocol=prepared", f"--client={connections}", "--jobs=2",
            f"--time={max(1, round(self._seconds))}", f"--file={self._servers.folder / (name + '.sql')}",
            f"--define=organization={self._organization}", f"--define=payload={_PAYLOAD}",
            f"--define=metadata={_METADATA}",
            f"--define=inserted={json.dumps({**json.loads(_METADATA), 'emitted_at': time.time()})}",
            "--log", f"--log-prefix={logs}",
            *([f"--rate={rate:.0f}"] if rate is not None else []),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
        failed = re.search(r"^number of failed transactions: (\d+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or found is None or (failed is not None and failed.group(1) != "0"):
            raise BenchError(f"pgbench {name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
        return float(found.group(1)), _p99_ms(logs)

    def _wait_until_published(self, prefix: str) -> None:
        deadline = time.monotonic() + CAUGHT_UP_WITHIN_S
        while look(self._servers.settings(prefix), self.url).waiting.rows:
            if time.monotonic() > deadline:
                raise BenchError(f"the relay did not catch up within {CAUGHT_UP_WITHIN_S:.0f} s")
            time.sleep(0.1)


def _p99_ms(prefix: Path) -> float:
    """Of pgbench's logs, which are deleted. Its time runs from the moment a transaction was due: the lag comes off."""
    times: list[int] = []
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        for line in path.read_text().splitlines():
            words = line.split()
            times.append(int(words[2]) - (int(words[6]) if len(words) > 6 else 0))
        path.unlink()
    times.sort()
    return times[int(len(times) * 0.99)] / 1000 if times else 0.0
