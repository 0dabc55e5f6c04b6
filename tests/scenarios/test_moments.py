"""S10: moments at the edges of what there is, from the table to a consumer. The codec's own cases: tests/schemas."""

from datetime import UTC, datetime

import schemas
from schemas.events.lead import Won
from tests.producers.relay.running import relay_of

MOMENTS = (
    "2026-11-29T00:00:00.000001+00:00",
    "1969-12-31T23:59:59.999999+00:00",
    "1901-12-13T20:45:51.000001+00:00",
    "9999-12-31T23:59:59.999999+00:00",
    "2026-03-29T02:30:00.123456+02:00",
    "2026-10-25T02:30:00.123456+01:00",
)


def test_microseconds_survive_from_the_row_to_the_consumer(database, topics, reader):
    organization = database.organization()
    with database.connect() as conn:
        for text in MOMENTS:
            conn.execute(
                "SELECT emit_event_for(%s, 'lead.won', 'lead', NULL, jsonb_build_object("
                "'value', '10.50', 'won_at', %s::text))",
                [organization, text],
            )
    with relay_of(topics, database):
        records = reader.wait_for(len(MOMENTS))
    created = dict(database.execute("SELECT id, created_at FROM event_log"))
    for record in records:
        event = schemas.decode(record.value())
        assert event.payload["won_at"] in MOMENTS
        assert isinstance(event.data, Won)
        assert event.data.won_at == datetime.fromisoformat(event.payload["won_at"])
        assert event.created_at == created[event.id]
        assert datetime.fromisoformat(dict(record.headers())["ce_time"].decode()) == created[event.id]
        _, milliseconds = record.timestamp()
        assert datetime.fromtimestamp(milliseconds / 1000, UTC) >= created[event.id].replace(microsecond=0)
    assert {schemas.decode(record.value()).payload["won_at"] for record in records} == set(MOMENTS)
