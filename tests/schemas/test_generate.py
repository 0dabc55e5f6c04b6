"""From models to committed files: no drift, the same bytes every time, published files for ever."""

import hashlib
import json
import shutil
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Literal

import fastavro
import pytest
from avro.schema import parse
from pydantic import Field

from schemas import asyncapi, catalogue, published
from schemas.consumption import CONSUMED_BY, is_dispatched
from schemas.errors import IncompatibleSchema
from schemas.events import lead, message
from schemas.events.base import Amount, Instant, Json, Payload
from schemas.generate import AVRO_DIRECTORY, IDS_FILE, _Writer, drift, generate, incompatibilities
from schemas.topics import FAMILIES

NOW = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def directory(tmp_path):
    """A copy of the committed files."""
    return shutil.copytree(AVRO_DIRECTORY, tmp_path / "avro")


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_committed_files_are_what_the_models_say():
    assert drift(AVRO_DIRECTORY) == []
    assert incompatibilities(AVRO_DIRECTORY) == []
    assert (AVRO_DIRECTORY.parent / asyncapi.DOCUMENT_FILE).read_text("utf-8") == asyncapi.render()


def test_generating_from_nothing_gives_the_same_bytes_twice(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        generate(tmp_path / name, NOW)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    committed = {path: data for path, data in contents(AVRO_DIRECTORY).items() if path.suffix == ".avsc"}
    versions = Counter(str(path).rpartition("-")[0] for path in committed)
    for path, data in contents(tmp_path / "one").items():
        # what has grown since is not what it was at first: its newest version is what the models say
        if path.suffix == ".avsc" and versions[str(path).rpartition("-")[0]] == 1:
            assert committed.get(path) == data


def test_generating_again_changes_nothing(directory):
    before = contents(directory)
    assert generate(directory, NOW) == []
    assert contents(directory) == before


def test_changed_published_file_is_found(directory):
    path = directory / published.all_published()[0].file
    path.write_text(path.read_text().replace("name", "nome"))
    assert any("was changed after it was published" in finding for finding in drift(directory))


def test_missing_and_foreign_files_are_found(directory):
    (directory / published.all_published()[0].file).unlink()
    (directory / "lead" / "stray-1.0.0.avsc").write_text("{}")
    findings = drift(directory)
    assert any("and missing" in finding for finding in findings)
    assert any("lead/stray-1.0.0.avsc is not in" in finding for finding in findings)


def test_new_optional_field_becomes_a_minor_version_and_the_old_one_stays(directory, monkeypatch):
    class Lost(lead.Lost):
        """A lead was lost."""

        competitor: str | None = None

    monkeypatch.setitem(catalogue.EVENTS, "lead.lost", Lost)
    before = contents(directory)
    assert any("lead.lost differs from" in finding for finding in drift(directory))
    (added,) = generate(directory, NOW)
    assert (added.event_type, added.version, added.file) == ("lead.lost", "1.1.0", "lead/lost-1.1.0.avsc")
    assert added.number == max(p.number for p in published.all_published()) + 1
    after = contents(directory)
    assert {path: after[path] for path in before if path.name != IDS_FILE} == {
        path: data for path, data in before.items() if path.name != IDS_FILE
    }
    assert drift(directory) == []
    assert incompatibilities(directory) == []


def test_other_words_become_a_patch_version(directory, monkeypatch):
    class Lost(lead.Lost):
        """A lead was lost for good."""

    monkeypatch.setitem(catalogue.EVENTS, "lead.lost", Lost)
    (added,) = generate(directory, NOW)
    assert added.version == "1.0.1"


def test_breaking_change_of_a_model_is_refused_and_nothing_is_written(directory, monkeypatch):
    class Read(message.Read):
        device: str

    monkeypatch.setitem(catalogue.EVENTS, "message.read", Read)
    before = contents(directory)
    with pytest.raises(IncompatibleSchema, match=r"message\.read.*device"):
        generate(directory, NOW)
    assert contents(directory) == before


def test_major_without_upcaster_is_found(monkeypatch):
    monkeypatch.setattr(catalogue, "UPCASTERS", {})
    assert incompatibilities(AVRO_DIRECTORY) == ["kb.document_changed major 1 has no upcaster"]


def test_number_is_never_used_twice_and_names_are_unique():
    entries = published.all_published()
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    assert len({(entry.name, entry.version) for entry in entries}) == len(entries)
    for entry in entries:
        assert hashlib.sha256(entry.text().encode()).hexdigest() == entry.sha256
        assert entry.schema_id == 0x40000000 + entry.number


def test_committed_schemas_are_avro_to_others_too():
    for entry in published.all_published():
        parsed: Any = fastavro.parse_schema(entry.schema())
        assert parsed["name"] == entry.name
        plain: Any = parse(json.dumps(_without_logical_types(entry.schema())))
        assert plain.fullname == entry.name


def _without_logical_types(schema):
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    return [_without_logical_types(part) for part in schema] if isinstance(schema, list) else schema


class Inner(Payload):
    """Inside."""

    price: Amount


class Everything(Payload):
    """One of each."""

    text: str
    yes: bool
    whole: int
    part: float
    amount: Amount
    at: Instant | None
    free: Json
    maybe: Json | None = None
    choice: Literal["a", "b"]
    inner: Inner
    again: Inner | None = None
    many: list[Inner]
    by_name: dict[str, int]
    named: str = Field(alias="from")


def test_every_type_has_its_avro_form():
    record = _Writer().record(Everything, "EverythingPayload")
    types = {field["name"]: field["type"] for field in record["fields"]}
    defaults = {field["name"] for field in record["fields"] if "default" in field}
    moment = {"type": "long", "logicalType": "timestamp-micros"}
    free = {"type": "string", "logicalType": "json"}
    assert (types["text"], types["yes"], types["whole"], types["part"]) == ("string", "boolean", "long", "double")
    assert types["amount"] == {"type": "string", "logicalType": "decimal-text"}
    assert types["at"] == ["null", moment]
    assert types["free"] == free
    assert types["maybe"] == ["null", free]
    assert types["choice"]["symbols"] == ["a", "b", "unknown"]
    assert types["choice"]["default"] == "unknown"
    assert types["inner"]["name"] == "Inner"
    assert types["again"] == ["null", "Inner"]
    assert types["many"] == {"type": "array", "items": "Inner"}
    assert types["by_name"] == {"type": "map", "values": "long"}
    assert types["from"] == "string"
    assert types["extra"] == {"type": "map", "values": free}
    assert defaults == {"maybe", "again", "extra"}


@pytest.mark.parametrize(
    ("hint", "default"),
    [(str, "x"), (str, None), (set[str], ...), (list[Instant], ...), (dict[int, str], ...), (str | int, ...)],
)
def test_model_that_has_no_exact_schema_is_refused(hint, default):
    body = {"__annotations__": {"field": hint}, "__module__": __name__, "__doc__": "x"}
    model = type("Unfit", (Payload,), body if default is ... else {**body, "field": default})
    with pytest.raises(TypeError):
        _Writer().record(model, "Unfit")


def test_asyncapi_has_every_topic_and_type_and_only_references_that_resolve():
    document = asyncapi.document()
    assert document["asyncapi"] == "3.0.0"
    assert {channel["address"] for channel in document["channels"].values()} == {f"events.{f}" for f in FAMILIES}
    messages = document["components"]["messages"]
    assert {message["x-event-type"] for message in messages.values()} - {published.CUSTOM} == published.event_types()
    placed = [name for channel in document["channels"].values() for name in channel["messages"]]
    assert sorted(placed) == sorted(messages)
    references = list(_references(document))
    assert references
    for reference in references:
        if reference.startswith("#/"):
            place = document
            for part in reference[2:].split("/"):
                place = place[part]
        else:
            assert (AVRO_DIRECTORY.parent / reference).is_file(), reference
    assert messages["kb.document_changed.v1"]["x-accepted-until"].startswith("2026-12-29")
    assert messages["contact_event.recorded.purchase_completed.v1"]["x-metric"] == "Order Paid"


def _references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_every_event_type_names_its_consumers():
    assert set(CONSUMED_BY) == set(catalogue.EVENTS)
    for event_type, workers in CONSUMED_BY.items():
        assert workers
        assert ("webhook-dispatch" in workers) == is_dispatched(event_type)
