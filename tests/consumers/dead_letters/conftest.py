"""The commands in this process, and dead letters without a worker that made them."""

from types import SimpleNamespace

import orjson
import pytest

from afluente.cli import main


@pytest.fixture
def here(database, topics, monkeypatch, capsys):
    """`here("list", ...)` runs `afluente dlq list ... --format json`: status, data, words. For tests that are no
    coroutines: the commands want the main thread, for their signals."""
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", topics.settings.bootstrap_servers)
    monkeypatch.setenv("AFLUENTE_TOPIC_PREFIX", topics.prefix)
    monkeypatch.setattr("afluente.telemetry.configure", lambda *arguments: None)  # it would outlive the test

    def run(*arguments, format="json"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["dlq", *(str(argument) for argument in arguments), "--format", format])
        said = capsys.readouterr()
        data = orjson.loads(said.out) if said.out and format == "json" else said.out or None
        return SimpleNamespace(status=int(ended.value.code or 0), data=data, words=said.err)

    return run


@pytest.fixture
def bury(database):
    """`bury(organization, ...)` commits an event and makes it a dead letter of a worker: the event's id. Its record is
    in event_log only."""

    def bury(organization, *, worker="mended-worker", error="b is broken", error_class="Reject", payload=None, **other):
        payload = payload or {"a": 1}
        columns = {"event_type": "thing.happened", "target": "", "state": "dead", "key": "k"} | other
        with database.connect() as conn:
            (event_id,) = conn.execute(
                "SELECT emit_event_for(%s, %s, 'thing', uuidv7(), %s::jsonb)",
                (organization, columns["event_type"], orjson.dumps(payload).decode()),
            ).fetchone()
            (created_at,) = conn.execute("SELECT created_at FROM event_log WHERE id = %s", [event_id]).fetchone()
            columns |= {"organization_id": organization, "event_id": event_id, "event_created_at": created_at}
            columns |= {"worker": worker, "last_error": error, "error_class": error_class, "attempts": 8}
            names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
            conn.execute(
                f"""INSERT INTO event_delivery ({names}, first_failure_at, finished_at)
                    VALUES ({places}, now() - interval '1 hour', CASE WHEN %s = 'dead' THEN now() END)""",
                [*columns.values(), columns["state"]],
            )
        return event_id

    return bury


@pytest.fixture
def bury_bytes(database):
    """`bury_bytes(7, 8)`: records of `t/0` at these offsets are no events; their dead letters are at `0/0`."""

    def bury(*offsets):
        database.execute(
            """
            INSERT INTO undecodable_record (worker, topic, partition, record_offset, record_timestamp, error_class,
                                            error, size_bytes, dead_partition, dead_offset)
            SELECT 'mended-worker', 't', 0, n, now(), 'DecodeError', 'schema id ' || n || ' is unknown', 4, 0, 0
              FROM unnest(%s::bigint[]) n
            """,
            [list(offsets)],
        )

    return bury
