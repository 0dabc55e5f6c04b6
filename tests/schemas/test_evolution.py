"""An event in two majors: both are read, the older is brought forward, and accepted for 30 days more."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest

from schemas import EncodeError, catalogue, codec, decode, encode, published
from schemas.events import lead
from schemas.events.kb import DocumentChanged
from schemas.generate import AVRO_DIRECTORY, generate
from tests.schemas.rows import row

TYPE = "kb.document_changed"
OLD = {"document_id": "d1", "change": "delete", "by": "ana"}
NEW = {"document_id": "d1", "action": "created"}

SECOND = next(entry for entry in published.all_published() if (entry.event_type, entry.major) == (TYPE, 2))
LAST_MOMENT = SECOND.published + timedelta(days=30)


def at(clock, moment):
    clock.set(moment)
    return clock.now()


@pytest.mark.parametrize("metadata", [{"schema_version": "1.0.0"}, {"schema_version": "1.7.3"}, {}])
def test_old_major_is_accepted_within_30_days_of_the_new_one(clock, metadata):
    event = decode(encode(row(TYPE, OLD, metadata, created_at=at(clock, LAST_MOMENT))))
    assert event.payload == OLD, "a consumer that reads the payload gets what was emitted"
    assert isinstance(event.data, DocumentChanged)
    assert (event.data.document_id, event.data.action) == ("d1", "deleted")
    assert event.data.model_extra == {"by": "ana"}


def test_old_major_is_refused_afterwards_with_the_date(clock):
    late = at(clock, LAST_MOMENT + timedelta(microseconds=1))
    with pytest.raises(EncodeError, match="accepted until") as caught:
        encode(row(TYPE, OLD, {"schema_version": "1.0.0"}, created_at=late))
    assert caught.value.field == "metadata.schema_version"
    with pytest.raises(EncodeError) as caught:
        encode(row(TYPE, OLD, created_at=late))
    assert caught.value.field == "payload.action", "without a stated version the newest major's fields are asked for"


def test_old_row_is_published_and_replayed_after_the_30_days(clock):
    clock.set(LAST_MOMENT + timedelta(days=300))
    value = encode(row(TYPE, OLD, {"schema_version": "1.0.0"}, created_at=SECOND.published - timedelta(days=5)))
    assert decode(value).payload == OLD


@pytest.mark.parametrize("metadata", [{"schema_version": "2.0.0"}, {}])
@pytest.mark.parametrize("days", [0, 400])
def test_new_major_is_always_accepted(clock, metadata, days):
    event = decode(encode(row(TYPE, NEW, metadata, created_at=at(clock, SECOND.published + timedelta(days=days)))))
    assert event.payload == NEW
    assert isinstance(event.data, DocumentChanged)
    assert event.data.action == "created"


def test_payload_of_another_major_than_stated_is_refused():
    with pytest.raises(EncodeError, match="required"):
        encode(row(TYPE, NEW, {"schema_version": "1.0.0"}))
    with pytest.raises(EncodeError, match="required"):
        encode(row(TYPE, OLD, {"schema_version": "2.0.0"}))


def test_upcaster_leaves_what_it_was_given():
    given = dict(OLD)
    assert catalogue.upcast(TYPE, given, 1) == {"document_id": "d1", "action": "deleted", "by": "ana"}
    assert given == OLD


def test_compatible_growth_flows_without_a_restart_of_old_consumers(tmp_path, monkeypatch):
    """S11: records of the old and the new minor version lie beside each other and both are read by what they name."""

    class Lost(lead.Lost):
        """A lead was lost."""

        competitor: str | None = None

    before = encode(row("lead.lost", {"reason": "price", "lost_at": "2026-12-01T00:00:00Z"}))
    directory = shutil.copytree(AVRO_DIRECTORY, tmp_path / "schemas" / "avro")
    monkeypatch.setitem(catalogue.EVENTS, "lead.lost", Lost)
    (added,) = generate(directory, datetime(2027, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(published, "files", lambda package: tmp_path / package)
    published.reload()
    try:
        payload = {"reason": "price", "lost_at": "2026-12-01T00:00:00Z", "competitor": "Loja B"}
        after = encode(row("lead.lost", payload))
        assert codec.schema_id_of(after) == added.schema_id
        assert codec.decode_record(after)[1]["payload"]["competitor"] == "Loja B"
        assert decode(after).payload == payload
        assert decode(before).payload == {"reason": "price", "lost_at": "2026-12-01T00:00:00Z"}
        # an emitter that knows nothing of the new field is fine too
        assert decode(encode(row("lead.lost", decode(before).payload))).payload == decode(before).payload
    finally:
        monkeypatch.undo()
        published.reload()
        codec._readers.pop(added.schema_id)
