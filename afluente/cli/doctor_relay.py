"""What `afluente doctor` says of the relay: how it stands, and what of the database it relies on. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from afluente.cli.doctor import KAFKA_TIMEOUT_S, Finding, State

if TYPE_CHECKING:
    from afluente.settings import KafkaSettings

STALL_S = 3.0


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything about the relay. What other checks have said (a server away, topics or migrations missing) is left
    out."""
    import psycopg
    from confluent_kafka import KafkaException

    from afluente import kafka as clients
    from afluente import postgres
    from afluente.errors import Refused, SettingsError, Unavailable
    from afluente.settings import KafkaSettings, PostgresSettings
    from producers.relay import status

    try:
        kafka, url = KafkaSettings.read(environment), PostgresSettings.read(environment).dsn
        clients.admin(kafka).list_topics(timeout=KAFKA_TIMEOUT_S)  # silent: of a Kafka that is away all is said
        state = status.look(kafka, url)
        with postgres.connect(url, application_name="afluente doctor", autocommit=True) as conn:
            yield from _state(state)
            yield from _dead_letters(conn, kafka)
            yield from _database(conn)
    except psycopg.errors.InsufficientPrivilege as error:
        yield Finding("relay.rights", State.problem, str(error).splitlines()[0], "afluente migrate up as the owner")
    except (SettingsError, Refused, psycopg.Error, KafkaException, TimeoutError):
        return
    except Unavailable as error:
        yield Finding("relay.positions", State.problem, str(error), error.hint or "afluente relay status")


def _state(state: Any) -> Iterator[Finding]:
    from producers.relay.status import Severity, remarks

    known = [remark for remark in remarks(state) if remark.kind != "relay.transactions"]  # said as kafka.transactions
    if not any(remark.severity is not Severity.note and remark.kind.startswith("relay.") for remark in known):
        owners = sum(lane.owner is not None for lane in state.lanes)
        if owners:
            rows, lanes = state.waiting.rows, len(state.lanes)
            yield Finding(
                "relay",
                State.ok,
                f"{state.words}: {lanes} lane{'s' * (lanes > 1)}, {state.published:,} rows published, {rows:,} wait",
            )
    for remark in known:
        yield Finding(remark.kind, State(remark.severity.value), remark.found, remark.fix)


def _dead_letters(conn: Any, kafka: KafkaSettings) -> Iterator[Finding]:
    from afluente.errors import Unavailable
    from consumers.dead_letters import Filter, relay

    try:
        found = relay.find(conn, kafka, Filter(limit=100_000), states=("dead", "gone"), stall_s=STALL_S)
    except Unavailable:
        return
    if found:
        newest = found[0]
        yield Finding(
            "relay.dead_letters",
            State.warning,
            f"{len(found):,} row{'s' * (len(found) > 1)} could not be published; the newest: {newest.event_type}, "
            f"{newest.error_class}: {newest.error}",
            "afluente dlq list --relay; when the reason is mended: afluente dlq retry --relay, else dlq discard",
        )


def _database(conn: Any) -> Iterator[Finding]:
    import sql
    from producers.relay.status import MONTHS_AHEAD

    queries = sql.queries("relay_control")
    cache_size, late_commit = conn.execute(queries["settings"]).fetchone()
    if cache_size != 1:
        yield Finding(
            "postgres.sequence",
            State.problem,
            f"the sequence of event_log has cache {cache_size}: sessions take numbers ahead, and the relay would "
            "publish a cause after its effect",
            "ALTER TABLE event_log ALTER COLUMN seq SET CACHE 1, then let every session that writes events reconnect",
        )
    if late_commit:
        yield Finding(
            "postgres.synchronous_commit",
            State.warning,
            f"{'; '.join(late_commit)}: what is not flushed when a commit returns can be lost in a crash after it was "
            "published (emit_event turns it on for its own transactions)",
            "set it to on there: ALTER DATABASE or ALTER ROLE ... RESET synchronous_commit",
        )
    (until,) = conn.execute(queries["months_ahead"]).fetchone()
    if until is None or until < (datetime.now(UTC) + MONTHS_AHEAD).date():
        yield Finding(
            "postgres.months",
            State.problem,
            f"event_log has partitions up to {until or 'nowhere'}: an insert after that fails",
            "afluente relay run makes them; by hand: SELECT afluente.ensure_partitions((now() + '3 months')::date)",
        )
