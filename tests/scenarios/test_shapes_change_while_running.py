"""S11: columns, fields and types come, change and go under a running relay. What it takes goes out without a restart;
what it cannot take is a dead letter in its place, and its organization's other events go on."""

import json

from psycopg.types.json import Jsonb

import schemas
from tests.producers.relay.oracle import EVENT_TYPE, assert_exactly_once_in_order
from tests.producers.relay.running import relay_of

LOST = {"reason": "price", "lost_at": "2026-12-01T00:00:00Z"}
TAKEN = (
    ("lead.lost", LOST),
    ("lead.lost", {**LOST, "competitor": None}),
    ("lead.lost", {**LOST, "competitor": "Loja B", "score": 0.5}),
    ("coupon.redeemed", {"code": "NATAL"}),  # nobody has heard of it
)
REFUSED = (
    ("lead.lost", {**LOST, "lost_at": 5}),  # another type
    ("lead.lost", {"lost_at": LOST["lost_at"]}),  # a required field that is no longer there
    ("ai.sentiment_alert", {"conversation_id": "c", "sentiment": "delighted", "score": 0.5}),  # an unknown symbol
)


def test_what_fits_goes_out_and_what_does_not_stops_nobody(database, topics, writers, reader):
    organization = writers.organizations[0]
    with relay_of(topics, database) as thread:
        writers.commit(2)
        reader.wait_for(2)
        with database.connect() as conn:
            for event_type, payload in TAKEN + REFUSED:
                emit = "SELECT emit_event_for(%s, %s, 'probe', NULL, %s)"
                conn.execute(emit, [organization, event_type, Jsonb(payload)])
                writers.emit(conn, organization)
        reader.wait_for(16)
        database.execute("ALTER TABLE event_log ADD COLUMN note text")
        writers.commit(1)
        reader.wait_for(17)
        database.execute("DROP VIEW event_log_status; ALTER TABLE event_log ALTER COLUMN entity_kind TYPE varchar(200)")
        writers.commit(1)
        reader.wait_for(18)
        assert thread.is_alive()
    records = reader.read_to_the_end()
    assert_exactly_once_in_order(database, records)
    dead = [json.loads(record.value()) for record in records if record.topic() == topics.relay_dead_letter]
    assert [(letter["event_type"], letter["row"]["payload"]) for letter in dead] == [*REFUSED]
    records.sort(key=lambda record: int(dict(record.headers())["seq"]))  # two topics have no order between them
    published = [schemas.decode(r.value()) for r in records if r.topic() != topics.relay_dead_letter]
    assert [(e.event_type, e.payload) for e in published if e.event_type != EVENT_TYPE] == [*TAKEN]
