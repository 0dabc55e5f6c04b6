"""Thousands of dead letters are a few errors: what counts as one, and finding its letters by it."""

from uuid import uuid4

import orjson
import psycopg
import pytest

from afluente import kafka as clients
from consumers import dead_letters
from tests.consumers.runtime.support import produce_raw

ID = "0199c0de-0000-7000-8000-0123456789ab"


def test_what_varies_in_an_error_is_cut_and_what_tells_causes_apart_stays(database):
    conn = database.connect()
    for error, pattern in {
        "the receiver answered 503": "the receiver answered 503",
        "HTTP/1.1 404 for order 1001": "HTTP/<n> 404 for order <n>",
        f"event {ID} is unknown": "event <id> is unknown",
        "timeout after 30.5 s, 3 of 1,000 rows": "timeout after <n> s, <n> of <n> rows",
        "POST https://user:pw@shop.example:8443/v1/orders/1001?token=abc#x failed": (
            "POST https://shop.example:<n>/v<n>/orders/<n>?… failed"
        ),
        "no contact maria.silva+1@example.com here": "no contact <email> here",
        "KeyError: 'order_id'": "KeyError: 'order_id'",
        "payload.price: 'R$ 19,90' is not a decimal": "payload.price: '…' is not a decimal",
        'name "Maria" can\'t be': 'name "…" can\'t be',
        "at 2026-11-29T20:00:00.123456+00:00, again at 2026-11-29 20:00:00Z": "at <time>, again at <time>",
        "wamid.HBgLNTUxMTk5OTk5OTk5OTkVAgASGBQz is gone": "wamid.<id> is gone",
        "object at 0x7f3a2c1b9d30": "object at <n>",
        "line\n  broken\tin two": "line broken in two",
    }.items():
        [(found,)] = conn.execute("SELECT afluente.error_pattern(%s)", [error]).fetchall()
        assert found == pattern
        # cut once, there is nothing more to cut: a cause does not depend on how often the rule ran
        assert conn.execute("SELECT afluente.error_pattern(%s)", [found]).fetchone() == (pattern,)


def test_letters_are_grouped_by_cause_and_taken_by_it(database, topics, here, bury, bury_bytes):
    topics.create(topics.retry("mended-worker", "now"), partitions=1)
    blue, red = database.organization("Loja Azul"), database.organization("Loja Rubra")
    for n in range(3):
        bury(blue, error=f"order {n} is not there", event_type="order.paid")
    newest = bury(red, error="order 77 is not there", event_type="order.paid")
    other = bury(red, error="order 78 is not there", event_type="order.sent")
    bury(blue, error="order 1 is not there", event_type="order.paid", worker="other-worker")
    review = bury(blue, error="order 9 is not there", event_type="order.paid", state="needs_review")
    bury_bytes(1, 2)
    found = here("causes", "--worker", "mended-worker")
    assert found.status == 0
    first, second, third = found.data
    assert (first["letters"], first["organizations"], first["event_type"]) == (5, 2, "order.paid")
    assert (first["error_class"], first["message"]) == ("Reject", "order <n> is not there")
    assert first["first_seen_at"] < first["last_seen_at"]
    assert first["example"] == f"mended-worker:{max(newest, review)}"
    assert (second["letters"], second["event_type"], second["organizations"]) == (2, None, 0)
    assert second["message"] == "schema id <n> is unknown"
    assert (third["letters"], third["example"]) == (1, f"mended-worker:{other}")
    assert [cause["letters"] for cause in here("causes", "--org", "Loja Rubra").data] == [1, 1]
    assert [cause["letters"] for cause in here("causes", "--cause", second["cause"]).data] == [2]
    assert "afluente dlq retry --cause" in found.words

    listed = here("list", "--cause", second["cause"])
    assert {letter["kind"] for letter in listed.data} == {"undecodable"}
    [letter] = here("list", "--cause", third["cause"]).data
    assert (letter["attempts"], letter["generation"], letter["edited"]) == (8, 0, False)
    assert letter["dead_letter"] == {"topic": topics.dead_letter("mended-worker"), "partition": None, "offset": None}
    # of the one cause only, and of it not what somebody has to look at first
    ran = here("retry", "--cause", first["cause"], "--yes", "--reason", "they are there now")
    assert (ran.status, ran.data["count"], ran.data["left"]) == (0, 4, 0)
    assert "1 more need review and are left out" in ran.words
    left = here("causes", "--worker", "mended-worker").data
    assert [(cause["letters"], cause["event_type"]) for cause in left] == [
        (2, None), (1, "order.paid"), (1, "order.sent")
    ]  # fmt: skip
    assert here("retry", "--cause", first["cause"], "--yes", "--reason", "x").status == 3
    named = here("retry", "--cause", first["cause"], "--state", "needs_review", "--yes", "--reason", "looked at")
    assert named.data["ids"] == [f"mended-worker:{review}"]
    assert {dict(r.headers())["x-generation"] for r in topics.records(topics.retry("mended-worker", "now"))} == {b"1"}


def test_those_of_the_relay_have_causes_too(database, topics, here):
    topics.create(topics.relay_dead_letter, partitions=1)
    organization, producer = database.organization(), clients.producer(topics.settings)
    for n in range(3):
        about: dict[str, object] = {
            "reason": f"payload.x: {n} is no text" if n else "too large",
            "error_class": "EncodeError",
        }
        about |= {"event_id": str(uuid4()), "seq": n, "created_at": "2026-11-29T10:00:00Z", "row": None}
        about |= {"organization_id": str(organization), "event_type": "lead.created", "reference": None}
        produce_raw(producer, topics.relay_dead_letter, orjson.dumps(about))
    producer.flush(30)
    [first, second] = here("causes", "--relay").data
    assert (first["letters"], first["message"], first["worker"]) == (2, "payload.x: <n> is no text", "relay")
    assert second["message"] == "too large"
    assert len(here("list", "--worker", "relay", "--cause", first["cause"]).data) == 2


def test_filters_that_do_not_apply_are_refused_and_a_login_without_rights_is_told_so(
    database, topics, here, monkeypatch
):
    for arguments, says in (
        (["list", "--relay", "--worker", "mended-worker"], "mended-worker has none of them"),
        (
            ["list", "--relay", "--state", "needs_review"],
            "--state needs_review: the relay's letters are dead",
        ),
        (["list", "--state", "published"], "letters of workers (without --relay) are dead, needs_review"),
        (["list", "--state", "waiting"], "--state waiting"),
        (["causes", "--cause", "x"], "'x' is no cause"),
        (["list", "--since", "1h", "--until", "2h"], "there is nothing between them"),
        (["list", "--error", "x" * 1001], "1,001 characters"),
        (["retry", "--worker", "\udcff"], "no text in UTF-8"),
        (["retry", "--all", "--rate", "nan"], "--rate"),
        (["retry", *["x"] * 10_001], "at most 10,000 letters"),
        (["export", "--all"], "--reason: say why"),
        (["export", "--reason", "x"], "say which"),
        (["edit", ID, "--reason", "x"], "say how"),
    ):
        ran = here(*arguments)
        assert (ran.status, ran.data) == (2, None), (arguments, ran)
        assert says in ran.words
    login = f"afluente_nobody_{uuid4().hex[:8]}"
    with database.server.admin() as admin:
        admin.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'x'")
        try:
            address = database.url.partition("@")[2]
            monkeypatch.setenv("DATABASE_URL", f"postgresql://{login}:x@{address}")
            for arguments in (["list"], ["retry", "--all", "--yes", "--reason", "x"]):
                ran = here(*arguments)
                assert ran.status == 4
                assert "GRANT afluente_worker" in ran.words
        finally:
            admin.execute(f"DROP ROLE {login}")


def test_many_letters_are_read_in_parts_as_they_were_at_the_beginning(database, bury):
    organization = database.organization()
    ids = {bury(organization) for _ in range(7)}
    with database.connect(autocommit=True) as conn:
        parts = dead_letters.each(conn, dead_letters.Filter(limit=6), 2)
        found = [*next(parts)]
        bury(organization)
        with conn.transaction():
            conn.execute("UPDATE event_delivery SET state = 'discarded'")
        found += [letter for part in parts for letter in part]
    assert len(found) == 6
    assert {letter.event_id for letter in found} < ids


def test_the_rule_is_closed_to_those_who_see_no_letters(database):
    conn = database.connect(role="afluente_app")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT afluente.error_pattern('x')")
