"""S6: rows in a past, the current and the next month, while partitions come and go and one transaction is in two."""

import time
import uuid
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.producers.relay.oracle import EVENT_TYPE, assert_exactly_once_in_order
from tests.producers.relay.running import relay_of
from tests.sql.test_event_log_months import month, partition, seal, snapshot

AT_MOST_S = 1.0


@pytest.fixture
def owner(database):
    """Whoever looks after the partitions; a wait for a lock of more than a second is an error."""
    conn = database.connect(role=None, autocommit=True)
    conn.execute("SET search_path = public")
    conn.execute(f"SET lock_timeout = '{AT_MOST_S}s'")
    return conn


def write(conn, organization, at):
    """An event of that moment; a version number like every other of its organization."""
    (version,) = conn.execute(
        "UPDATE public.probe SET version = version + 1 WHERE organization_id = %s RETURNING version", [organization]
    ).fetchone()
    conn.execute(
        "INSERT INTO public.event_log (organization_id, event_type, entity_kind, entity_id, payload, created_at)"
        " VALUES (%s, %s, 'contact', %s, %s, %s)",
        [organization, EVENT_TYPE, uuid.uuid4(), Jsonb({"version": version}), at],
    )


def quickly(conn, statement):
    began = time.monotonic()
    conn.execute(statement)
    took = time.monotonic() - began
    assert took < AT_MOST_S, f"{statement}: {took:.2f} s"


def test_rows_of_three_months_go_out_in_order_while_partitions_are_made_and_taken_away(
    database, topics, writers, reader, owner
):
    past, border = datetime.now(UTC).replace(day=1) - timedelta(days=3), month(1)
    straddling = database.connect(role=None)
    with relay_of(topics, database):
        write(straddling, writers.organizations[0], border - timedelta(microseconds=1))
        for at in (past, datetime.now(UTC), border, border + timedelta(days=40)):
            write(owner, writers.organizations[1], at)
        reader.wait_for(4)
        # New months while a transaction is in two old ones.
        quickly(owner, f"SELECT afluente.ensure_partitions('{month(6):%Y-%m-%d}')")
        write(straddling, writers.organizations[0], border)
        write(owner, writers.organizations[1], month(6))
        reader.wait_for(5)
        straddling.commit()
        write(owner, writers.organizations[0], past)
        reader.wait_for(8)
        # A published month is taken away and comes back, in each of the ways there are, while others are written.
        far = partition(month(6))
        bounds = f"FROM ('{month(6):%Y-%m-%d} 00:00+00') TO ('{month(7):%Y-%m-%d} 00:00+00')"
        count = 8
        for how in ("", "CONCURRENTLY"):
            quickly(owner, f"ALTER TABLE event_log DETACH PARTITION {far} {how}")
            began = time.monotonic()
            write(owner, writers.organizations[2], past)
            quickly(owner, f"ALTER TABLE event_log ATTACH PARTITION {far} FOR VALUES {bounds}")
            count += 1
            reader.wait_for(count)
            assert time.monotonic() - began < 2 * AT_MOST_S
        write(owner, writers.organizations[2], month(6))
        reader.wait_for(count + 1)
    assert_exactly_once_in_order(database, reader.read_to_the_end())


def test_a_month_is_sealed_under_the_relay_and_refuses_what_comes_after(database, topics, writers, reader, owner):
    past = datetime.now(UTC).replace(day=1) - timedelta(days=3)
    with relay_of(topics, database):
        write(owner, writers.organizations[0], past)
        reader.wait_for(1)
        seal(owner, "3:3:", 0)  # notes the boundary
        ((top,),) = owner.execute("SELECT max(seq) FROM event_log").fetchall()
        assert seal(owner, snapshot(owner), top) == 1
        with pytest.raises(psycopg.Error) as refused:
            write(owner, writers.organizations[0], past)
        assert refused.value.sqlstate == "AF008"
        database.execute("UPDATE public.probe SET version = 1 WHERE organization_id = %s", [writers.organizations[0]])
        writers.commit(3)
        reader.wait_for(4)
    with relay_of(topics, database):  # which leaves the sealed month out
        writers.commit(2)
        reader.wait_for(6)
    assert_exactly_once_in_order(database, reader.read_to_the_end())
