"""Contacts in races: one person is one contact however it comes in, and a merge loses nothing that is being written."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.types.json import Jsonb

import sql
from afluente import postgres as connections
from producers.ingest.normalize import facts as f
from tests.fixtures.postgres import clone
from tests.sql.rows import Planter

WITH_NINTH, WITHOUT_NINTH = "+55 11 98765-4321", "551187654321"


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def organization(database):
    return database.organization("Mine")


@contextmanager
def acting(database, organization, role="afluente_app"):
    """A transaction of an application of the organization; committed at the end."""
    with connections.connect(database.url, application_name="test") as conn:
        with connections.act_for_sync(conn, organization, role=role):
            yield conn
        conn.commit()


def identities(*person):
    return Jsonb([{"kind": i.kind, "source": i.source, "value": i.value, "as_received": i.as_received} for i in person])


def upsert(conn, organization, *person, name=None):
    return conn.execute(
        "SELECT contact_id, created, conflict FROM upsert_contact(%s, %s, %s, 'test')",
        [organization, identities(*person), name],
    ).fetchone()


def contact(database, organization, *person, name="Ana"):
    with acting(database, organization) as conn:
        return upsert(conn, organization, *person, name=name)[0]


def merge(conn, gone, stays, actor="ana@loja", reason="the same phone"):
    return conn.execute(
        "SELECT contact_id, merged, merged_fields, moved FROM merge_contacts(%s, %s, %s, %s)",
        [gone, stays, actor, reason],
    ).fetchone()


def record(conn, contact, name, metric="Order Placed", value=None):
    return conn.execute(
        "SELECT record_contact_event(%s, metric_name => %s, source => 'shop', external_event_id => %s, value => %s)",
        [contact, metric, name, value],
    ).fetchone()[0]


def emitted(database, organization, event_type):
    return database.execute(
        "SELECT entity_id, payload FROM event_log WHERE organization_id = %s AND event_type = %s ORDER BY seq",
        [organization, event_type],
    )


def waiting(database):
    """How many sessions of this database wait for a lock."""
    return database.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )[0][0]


def until_waiting(database, count=1):
    while waiting(database) < count:
        threading.Event().wait(0.005)


# -------------------- upsert


@pytest.mark.parametrize("in_order", [True, False])
def test_many_deliveries_of_one_new_person_make_one_contact(database, organization, in_order):
    phones = [f.phone_identity(text) for text in (WITH_NINTH, WITHOUT_NINTH, "(11) 8765-4321", "+5511987654321")]
    email, shopify = f.email_identity("Ana@Example.com"), f.external_identity("shopify", "501")
    people = [[*([phone, email, shopify] if n % 2 else [phone, shopify])] for n, phone in enumerate(phones * 6)]
    if not in_order:
        people = [person[:: random.Random(n).choice([1, -1])] for n, person in enumerate(people)]
    start = threading.Barrier(len(people))

    def one(person):
        with acting(database, organization) as conn:
            start.wait()
            return upsert(conn, organization, *person)

    with ThreadPoolExecutor(len(people)) as pool:
        found = list(pool.map(one, people))
    assert len({row[0] for row in found}) == 1
    assert sum(row[1] for row in found) == 1
    assert database.execute("SELECT count(*) FROM contacts WHERE organization_id = %s", [organization]) == [(1,)]
    assert database.execute(
        "SELECT kind, source, value FROM contact_identities WHERE organization_id = %s ORDER BY 1", [organization]
    ) == [("email", "", "ana@example.com"), ("external", "shopify", "501"), ("phone", "", "+5511987654321")]


def test_identities_of_two_sources_and_two_organizations_are_not_one(database, organization):
    other = database.organization("Theirs")
    a = contact(database, organization, f.external_identity("shopify", "1"))
    b = contact(database, organization, f.external_identity("stripe", "1"))
    c = contact(database, other, f.external_identity("shopify", "1"))
    assert len({a, b, c}) == 3
    assert contact(database, organization, f.external_identity("shopify", "1")) == a


def test_identity_given_without_the_locks_in_between_leaves_no_double(database, organization):
    phone, email = f.phone_identity(WITH_NINTH), f.email_identity("ana@example.com")
    first = contact(database, organization, email)
    with ThreadPoolExecutor(1) as pool, acting(database, organization) as conn:
        # A person's new number: an identity for a contact that is there, and no lock but the row's.
        conn.execute(
            "INSERT INTO contact_identities (organization_id, kind, value, contact_id) VALUES (%s, 'phone', %s, %s)",
            [organization, phone.value, first],
        )
        meanwhile = pool.submit(contact, database, organization, phone)
        until_waiting(database)
        conn.commit()
        assert meanwhile.result(10) == first
    assert database.execute("SELECT count(*) FROM contacts WHERE organization_id = %s", [organization]) == [(1,)]


# -------------------- merge


@pytest.fixture
def pair(database, organization):
    """Two contacts of one person, with things of every kind: (the one that goes, the one that stays)."""
    gone = contact(database, organization, f.phone_identity(WITH_NINTH), f.external_identity("shopify", "1"))
    stays = contact(database, organization, f.email_identity("ana@example.com"), name=None)
    with acting(database, organization) as conn:
        for each, tags in ((gone, ("vip", "sp")), (stays, ("vip",))):
            for tag in tags:
                conn.execute("SELECT add_tag(%s, %s)", [each, tag])
        for each in (gone, stays):
            conversation = conn.execute("SELECT conversation_id FROM open_conversation(%s, NULL)", [each]).fetchone()[0]
            conn.execute(
                "INSERT INTO messages (organization_id, conversation_id, contact_id, direction, status)"
                " VALUES (%s, %s, %s, 'in', 'received')",
                [organization, conversation, each],
            )
            conn.execute(
                "INSERT INTO orders (organization_id, contact_id, source, external_id) VALUES (%s, %s, 'shop', %s)",
                [organization, each, str(each)],
            )
            record(conn, each, f"order_placed:{each}", value=10)
    return gone, stays


def test_merge_moves_everything_says_who_and_why_and_is_an_event(database, organization, pair):
    gone, stays = pair
    with acting(database, organization) as conn:
        conn.execute(
            "UPDATE contacts SET subscriber_state = 'blocked', subscriber_state_at = now() WHERE id = %s", [gone]
        )
        found = merge(conn, gone, stays)
        assert emitted(database, organization, "contact.merged") == []  # not before it is committed
    assert found[:3] == (stays, True, ["name", "phone", "subscriber_state"])
    assert found[3] == {
        "contact_identities": 2, "contact_tag_links": 1, "conversations": 1, "messages": 1, "orders": 1, "leads": 0,
        "automation_runs": 0, "tracked_links": 0, "link_clicks": 0, "contact_events": 4,
    }  # fmt: skip
    for table in ("contact_identities", "contact_tag_links", "conversations", "messages", "orders"):
        rows = database.execute(f"SELECT DISTINCT contact_id FROM {table} WHERE organization_id = %s", [organization])
        assert rows == [(stays,)], table
    tags = "SELECT t.name FROM contact_tag_links l JOIN tags t ON t.id = l.tag_id WHERE l.contact_id = %s ORDER BY 1"
    assert database.execute(tags, [stays]) == [("sp",), ("vip",)]
    assert database.execute(
        "SELECT name, phone_e164, email, subscriber_state, merged_into FROM contacts WHERE id = %s", [stays]
    ) == [("Ana", "+5511987654321", "ana@example.com", "blocked", None)]
    # one conversation of the two stays open, the other one was closed and says so
    states = "SELECT status, count(*) FROM conversations WHERE organization_id = %s GROUP BY 1 ORDER BY 1"
    assert database.execute(states, [organization]) == [("open", 1), ("resolved", 1)]
    assert len(emitted(database, organization, "conversation.resolved")) == 1
    ((actor, reason),) = database.execute(
        "SELECT actor_id, details ->> 'reason' FROM audit_logs"
        " WHERE organization_id = %s AND action = 'contact.merged'",
        [organization],
    )
    assert (actor, reason) == ("ana@loja", "the same phone")
    ((entity, payload),) = emitted(database, organization, "contact.merged")
    assert entity == stays
    assert payload == {
        "from_contact_id": str(gone), "into_contact_id": str(stays), "merged_fields": found[2],
    }  # fmt: skip
    # again, in both directions: it is so already
    with acting(database, organization) as conn:
        assert merge(conn, gone, stays)[:3] == (stays, False, [])
        assert merge(conn, stays, gone)[:3] == (stays, False, [])
    assert len(emitted(database, organization, "contact.merged")) == 1


def test_the_same_word_of_both_keeps_the_time_of_the_later(database, organization, pair):
    gone, stays = pair
    for each, at in ((gone, "2026-11-03T10:00:00Z"), (stays, "2026-11-01T10:00:00Z")):
        database.execute(
            "UPDATE contacts SET subscriber_state = 'blocked', subscriber_state_at = %s WHERE id = %s", [at, each]
        )
    with acting(database, organization) as conn:
        assert merge(conn, gone, stays)[2] == ["name", "phone"]
    at = "SELECT subscriber_state, subscriber_state_at = '2026-11-03T10:00:00Z' FROM contacts WHERE id = %s"
    assert database.execute(at, [stays]) == [("blocked", True)]


def test_what_comes_for_the_merged_one_lands_on_the_one_that_stayed(database, organization, pair):
    gone, stays = pair
    with acting(database, organization) as conn:
        merge(conn, gone, stays)
        event = record(conn, gone, "order_placed:later")
        conn.execute("SELECT add_tag(%s, 'late')", [gone])
        conn.execute(
            "INSERT INTO orders (organization_id, contact_id, source, external_id) VALUES (%s, %s, 'shop', 'later')",
            [organization, gone],
        )
        opened = conn.execute("SELECT opened FROM open_conversation(%s, NULL)", [gone]).fetchone()[0]
        assert not opened
        assert upsert(conn, organization, f.phone_identity(WITHOUT_NINTH))[0] == stays
        assert conn.execute('SELECT update_contact(%s, \'{"name": "Ana P"}\')', [gone]).fetchone()[0] == ["name"]
    assert database.execute("SELECT contact_id FROM contact_events WHERE id = %s", [event]) == [(stays,)]
    assert database.execute("SELECT name, merged_into FROM contacts WHERE id = %s", [gone]) == [("Ana", stays)]
    assert database.execute("SELECT count(*) FROM orders WHERE contact_id = %s", [gone]) == [(0,)]
    *_, order, tag, update = emitted(database, organization, "contact_event.recorded")
    for entity, payload in (order, tag, update):
        assert (entity, payload["contact_id"]) == (stays, str(stays))


def test_chains_are_followed_and_stay_one_step_deep(database, organization):
    a, b, c, d = (contact(database, organization, f.external_identity("s", str(n))) for n in range(4))
    with acting(database, organization) as conn:
        for n, each in enumerate((a, b, c, d)):
            record(conn, each, f"order_placed:{n}")
        merge(conn, a, b)
        assert merge(conn, a, c)[0] == c  # a stands for b now: b goes into c
        assert merge(conn, d, b)[0] == c
        ids = conn.execute("SELECT afluente.contact_ids(%s, %s)", [organization, a]).fetchone()[0]
        assert ids[0] == c
        assert set(ids) == {a, b, c, d}
        counted = "SELECT count(*) FROM contact_events WHERE organization_id = %s AND contact_id = ANY (%s)"
        assert conn.execute(counted, [organization, ids]).fetchone() == (4,)
    into = "SELECT DISTINCT merged_into FROM contacts WHERE id = ANY (%s)"
    assert database.execute(into, [[a, b, d]]) == [(c,)]
    merges = [payload for _, payload in emitted(database, organization, "contact.merged")]
    assert [(payload["from_contact_id"], payload["into_contact_id"]) for payload in merges] == [
        (str(a), str(b)), (str(b), str(c)), (str(d), str(c)),
    ]  # fmt: skip


def test_merges_that_make_no_sense_are_refused(database, organization):
    a, b = (contact(database, organization, f.external_identity("s", str(n))) for n in range(2))
    foreign = contact(database, database.organization("Theirs"), f.external_identity("s", "1"))
    erased = contact(database, organization, f.external_identity("s", "2"))
    database.execute("UPDATE contacts SET anonymized_at = now() WHERE id = %s", [erased])
    for gone, stays, reason, state in (
        (a, a, "same", "AF020"),
        (a, foreign, "same", "AF010"),
        (foreign, a, "same", "AF010"),
        (a, None, "same", "AF010"),
        (a, erased, "same", "AF021"),
        (erased, a, "same", "AF021"),
        (a, b, " ", "AF022"),
    ):
        with pytest.raises(psycopg.Error) as refused, acting(database, organization) as conn:
            merge(conn, gone, stays, reason=reason)
        assert refused.value.sqlstate == state, (gone, stays)
    with pytest.raises(psycopg.Error) as refused, connections.connect(database.url) as conn:
        merge(conn, a, b)
    assert refused.value.sqlstate == "AF001"
    assert emitted(database, organization, "contact.merged") == []


def test_every_table_that_points_at_contacts_is_moved(database):
    """A new one has to be thought of: move it in merge_contacts, and give it the trigger."""
    source = database.execute("SELECT prosrc FROM pg_proc WHERE proname = 'merge_contacts'")[0][0]
    for table, column, triggers in database.execute(
        """
        SELECT c.conrelid::regclass::text, a.attname::text,
               ARRAY(SELECT tgname::text FROM pg_trigger t WHERE t.tgrelid = c.conrelid)
          FROM pg_constraint c
          JOIN pg_attribute a
            ON a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey) AND a.attname <> 'organization_id'
         WHERE c.confrelid = 'contacts'::regclass AND c.contype = 'f' AND c.conparentid = 0
        """
    ):
        if table in ("contacts", "contact_events"):  # itself; append-only
            continue
        assert column == "contact_id", (table, column)
        assert table in source, f"{table} is not moved by a merge"
        assert "follow_merge" in triggers, f"{table} takes rows of a contact that was merged away"


def test_row_that_is_being_written_is_waited_for_and_moved(database, organization, pair):
    gone, stays = pair
    with ThreadPoolExecutor(1) as pool:
        with acting(database, organization) as conn:
            conn.execute(
                "INSERT INTO orders (organization_id, contact_id, source, external_id) VALUES (%s, %s, 'shop', 'held')",
                [organization, gone],
            )
            record(conn, gone, "order_placed:held")

            def merging():
                with acting(database, organization) as other:
                    return merge(other, gone, stays)[1]

            merged = pool.submit(merging)
            until_waiting(database)
            assert not merged.done()
        assert merged.result(10)
    assert database.execute("SELECT contact_id FROM orders WHERE external_id = 'held'") == [(stays,)]
    counted = "SELECT count(*) FROM contact_events WHERE external_event_id = 'order_placed:held'"
    counted += " AND contact_id = ANY (afluente.contact_ids(organization_id, %s))"
    assert database.execute(counted, [stays]) == [(1,)]


def test_row_that_comes_during_a_merge_waits_and_follows(database, organization, pair):
    gone, stays = pair
    with ThreadPoolExecutor(2) as pool:
        with acting(database, organization) as conn:
            merge(conn, gone, stays)

            def writing(what):
                with acting(database, organization) as other:
                    if what == "event":
                        return record(other, gone, "order_placed:during")
                    return other.execute(
                        "INSERT INTO orders (organization_id, contact_id, source, external_id)"
                        " VALUES (%s, %s, 'shop', 'during') RETURNING contact_id",
                        [organization, gone],
                    ).fetchone()[0]

            event, order = pool.submit(writing, "event"), pool.submit(writing, "order")
            until_waiting(database, 2)
        assert order.result(10) == stays
        assert database.execute("SELECT contact_id FROM contact_events WHERE id = %s", [event.result(10)]) == [(stays,)]


def test_merges_racing_with_everything_lose_nothing(database, organization):
    """Eight writers record facts and orders for six contacts of one person while they are merged, in any order."""
    people = [contact(database, organization, f.external_identity("s", str(n))) for n in range(6)]
    writers, each = 8, 15
    start = threading.Barrier(writers + 2)

    def writing(number):
        dice = random.Random(number)
        start.wait()
        for n in range(each):
            while True:
                try:
                    with acting(database, organization) as conn:
                        chosen = dice.choice(people)
                        record(conn, chosen, f"order_placed:{number}-{n}", value=1)
                        conn.execute(
                            "INSERT INTO orders (organization_id, contact_id, source, external_id)"
                            " VALUES (%s, %s, 'shop', %s)",
                            [organization, chosen, f"{number}-{n}"],
                        )
                    break
                except psycopg.errors.DeadlockDetected:
                    continue

    def merging(pairs):
        start.wait()
        for gone, stays in pairs:
            while True:
                try:
                    with acting(database, organization) as conn:
                        merge(conn, gone, stays)
                    break
                except psycopg.errors.DeadlockDetected:
                    continue

    with ThreadPoolExecutor(writers + 2) as pool:
        jobs = [pool.submit(writing, number) for number in range(writers)]
        jobs.append(pool.submit(merging, [(people[0], people[1]), (people[2], people[3]), (people[1], people[4])]))
        jobs.append(pool.submit(merging, [(people[3], people[0]), (people[5], people[2]), (people[4], people[5])]))
        for job in jobs:
            job.result(60)
    ((stays,),) = database.execute(
        "SELECT id FROM contacts WHERE organization_id = %s AND merged_into IS NULL", [organization]
    )
    total = writers * each
    assert database.execute(
        "SELECT count(*), sum(value) FROM contact_events WHERE organization_id = %s AND metric_name = 'Order Placed'"
        " AND contact_id = ANY (afluente.contact_ids(%s, %s))",
        [organization, organization, stays],
    ) == [(total, total)]
    orders = "SELECT contact_id, count(*) FROM orders WHERE organization_id = %s GROUP BY 1"
    assert database.execute(orders, [organization]) == [(stays, total)]
    assert len(emitted(database, organization, "contact.merged")) == 5
    # What a reader of the topics makes of it, in whatever order contact.merged and contact_event.recorded reach it.
    log = [
        (kind, payload)
        for kind in ("contact_event.recorded", "contact.merged")
        for _, payload in emitted(database, organization, kind)
    ]
    for seed in range(20):
        assert folded(random.Random(seed).sample(log, len(log))) == {(str(stays), "Order Placed"): total}
    recount = sql.queries("contact_events")["recount"]
    for asked in (None, *people):
        counted = database.execute(recount, {"organization_id": organization, "contact_id": asked})
        assert [row[:3] for row in counted] == [(stays, "Order Placed", total)]


def folded(log):
    """Counts by contact and metric, where a merge moves what is counted and what comes later follows it."""
    counts, into = {}, {}

    def survivor(contact):
        while contact in into:
            contact = into[contact]
        return contact

    for kind, payload in log:
        if kind == "contact_event.recorded":
            key = (survivor(payload["contact_id"]), payload["metric_name"])
            counts[key] = counts.get(key, 0) + 1
        else:
            gone, stays = survivor(payload["from_contact_id"]), survivor(payload["into_contact_id"])
            if gone == stays:
                continue
            into[gone] = stays
            for contact_id, metric in [key for key in counts if key[0] == gone]:
                count = counts.pop((contact_id, metric))
                counts[stays, metric] = counts.get((stays, metric), 0) + count
    return counts


def test_conflict_is_answered_by_a_merge(database, organization):
    a, b = (contact(database, organization, f.external_identity("s", str(n))) for n in range(2))
    database.execute(
        "INSERT INTO alerts (organization_id, kind, title, details, dedupe_key)"
        " VALUES (%s, 'contact_conflict', 't', %s, 'x')",
        [organization, Jsonb({"contact_ids": [str(a), str(b)]})],
    )
    with acting(database, organization) as conn:
        merge(conn, a, b)
    assert database.execute("SELECT status FROM alerts WHERE organization_id = %s", [organization]) == [("resolved",)]


# -------------------- what happens to a contact is a contact event


def facts(database, organization):
    return database.execute(
        "SELECT coalesce(event_type, metric_name), source, properties FROM contact_events"
        " WHERE organization_id = %s ORDER BY created_at, id",
        [organization],
    )


def test_contact_is_created_once_and_says_so(database, organization):
    with acting(database, organization) as conn:
        create = "SELECT contact_id, created FROM create_contact(%s, %s)"
        first = conn.execute(create, ["Ana", identities(f.phone_identity(WITH_NINTH))]).fetchone()
        again = conn.execute(create, ["Ana", identities(f.phone_identity(WITHOUT_NINTH))]).fetchone()
        assert (first[1], again) == (True, (first[0], False))
        assert conn.execute(create, ["Nobody's number", "[]"]).fetchone()[1]
    assert [fact[:2] for fact in facts(database, organization)] == [("Contact Created", "crm")] * 2
    ((_, payload), _) = emitted(database, organization, "contact.created")
    assert payload == {"phone": "+5511987654321", "name": "Ana", "source": "crm"}


def test_tags_come_and_go_once_each(database, organization):
    ana = contact(database, organization, f.external_identity("s", "1"))
    with acting(database, organization) as conn:
        did = [
            conn.execute(f"SELECT {verb}_tag(%s, 'vip', 'automation')", [ana]).fetchone()[0]
            for verb in ("remove", "add", "add", "remove", "remove", "add")
        ]
    assert did == [False, True, False, True, False, True]
    assert [fact[:2] for fact in facts(database, organization)] == [
        ("Tag Added", "automation"), ("Tag Removed", "automation"), ("Tag Added", "automation"),
    ]  # fmt: skip
    assert facts(database, organization)[0][2]["tag"] == "vip"


def test_conversation_is_opened_assigned_and_closed_once(database, organization):
    ana = contact(database, organization, f.external_identity("s", "1"))
    member = database.execute(
        "INSERT INTO members (organization_id, user_id, email) VALUES (%s, uuidv7(), 'a@b.c') RETURNING id",
        [organization],
    )[0][0]
    with acting(database, organization) as conn:
        conversation, opened = conn.execute("SELECT * FROM open_conversation(%s, NULL)", [ana]).fetchone()
        assert (opened, conn.execute("SELECT * FROM open_conversation(%s, NULL)", [ana]).fetchone()[1]) == (True, False)
        assign = "SELECT assign_conversation(%s, %s)"
        assert [conn.execute(assign, [conversation, member]).fetchone()[0] for _ in range(2)] == [True, False]
        close = "SELECT close_conversation(%s, 'ana', 'done', 'automation', '{\"causation_depth\": 1}')"
        assert [conn.execute(close, [conversation]).fetchone()[0] for _ in range(2)] == [True, False]
        again = conn.execute("SELECT conversation_id FROM open_conversation(%s, NULL)", [ana]).fetchone()[0]
        assert again != conversation
    assert [fact[:2] for fact in facts(database, organization)] == [
        ("conversation_started", "crm"), ("Conversation Assigned", "crm"), ("conversation_ended", "automation"),
        ("conversation_started", "crm"),
    ]  # fmt: skip
    assert facts(database, organization)[2][2].keys() == {"channel", "durationSeconds", "messageCount"}
    for event_type, count in (("opened", 2), ("assigned", 1), ("resolved", 1)):
        assert len(emitted(database, organization, f"conversation.{event_type}")) == count
    depths = "SELECT DISTINCT event_type, metadata ->> 'causation_depth' FROM event_log WHERE organization_id = %s"
    depths += " AND metadata ? 'causation_depth' ORDER BY 1"
    assert database.execute(depths, [organization]) == [
        ("contact_event.recorded", "1"), ("conversation.resolved", "1"),
    ]  # fmt: skip


def test_contact_that_is_changed_says_which_fields_and_never_takes_anothers_number(database, organization):
    ana = contact(database, organization, f.phone_identity(WITH_NINTH))
    bia = contact(database, organization, f.email_identity("bia@example.com"), name="Bia")
    change = "SELECT update_contact(%s, %s)"
    with acting(database, organization) as conn:
        new = Jsonb({"name": "Ana Prado", "phone": "+5511987654321", "email": "ana@example.com"})
        assert conn.execute(change, [ana, new]).fetchone()[0] == ["email", "name"]
        assert conn.execute(change, [ana, new]).fetchone()[0] == []
        assert upsert(conn, organization, f.email_identity("ana@example.com"))[0] == ana
    with pytest.raises(psycopg.Error) as refused, acting(database, organization) as conn:
        conn.execute(change, [bia, Jsonb({"phone": "+5511987654321"})])
    assert refused.value.sqlstate == "AF023"
    assert f"afluente contact merge {ana} --into {bia}" in refused.value.diag.message_hint
    with pytest.raises(psycopg.Error) as refused, acting(database, organization) as conn:
        conn.execute(change, [ana, Jsonb({"source": "x"})])
    assert refused.value.sqlstate == "AF004"
    assert facts(database, organization) == [("Contact Updated", "crm", {"fields": ["email", "name"]})]


@pytest.mark.parametrize(
    "call",
    [
        "SELECT add_tag(%s, 'vip')",
        "SELECT remove_tag(%s, 'vip')",
        "SELECT open_conversation(%s, NULL)",
        'SELECT update_contact(%s, \'{"name": "x"}\')',
    ],
)
@pytest.mark.parametrize("role", ["afluente_app", "afluente_admin", "afluente_worker"])
def test_another_organizations_contact_is_refused(database, organization, call, role):
    foreign = contact(database, database.organization("Theirs"), f.external_identity("s", "1"))
    with pytest.raises(psycopg.Error) as refused, acting(database, organization, role=role) as conn:
        conn.execute(call, [foreign])
    assert refused.value.sqlstate == "AF010"
    with pytest.raises(psycopg.Error) as refused, connections.connect(database.url, role=role) as conn:
        conn.execute(call, [foreign])
    assert refused.value.sqlstate == "AF001"


def test_another_organizations_conversation_is_not_there(database, organization):
    conn = database.connect(role=None, autocommit=True)
    theirs = database.organization("Theirs")
    conversation = Planter(conn, [theirs]).plant("conversations", theirs)["id"]
    with acting(database, organization) as conn:
        for call in ("SELECT close_conversation(%s, 'me')", "SELECT assign_conversation(%s, uuidv7())"):
            assert conn.execute(call, [conversation]).fetchone() == (False,)
