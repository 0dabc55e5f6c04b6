"""A real registry: registering, its ids on new records, decoding by them, and the Confluent serializer's bytes."""

import json
import os
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    topic_record_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import schemas
from afluente.errors import Refused, Unavailable
from afluente.kafka import schema_registry
from afluente.kafka.schema_registry import ConfluentRegistry
from schemas import EncodeError, UnknownSchemaError, codec, published
from schemas.topics import Topics
from tests.schemas import apicurio
from tests.schemas.rows import RECORDED, row

PREFIX = f"t{uuid.uuid4().hex[:8]}."  # subjects begin with the topic: a registry that others use is fine

SAMPLES = [
    row("contact_event.recorded", RECORDED, {"request_id": "r1"}),
    row("contact_event.recorded", {**RECORDED, "contact_event_type": None, "properties": {"a": [1]}}),
    row("lead.updated", {"changes": {"name": {"from": None, "to": "Ana"}}}),
    row("message.received", {"direction": "in", "conversation_id": "c", "contact_id": "k", "body": "oi",
                             "media_urls": ["u1", "u2"], "waha_message_id": "w", "unknown": {"x": None}}),
    row("message.failed", {"message_id": "m", "error_code": "131047", "error_message": "no", "retryable": True}),
    row("ai.sentiment_alert", {"conversation_id": "c", "sentiment": "angry", "score": 0.5}, entity_id=None),
    row("kb.document_changed", {"document_id": "d", "change": "edit"}, {"schema_version": "1.0.0"}),
    row("loyalty.points_earned", {"points": 3}),
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The registry named by SCHEMA_REGISTRY_URL, or one of this run's own."""
    if given := os.environ.get("SCHEMA_REGISTRY_URL"):
        yield given
    else:
        with apicurio.running(tmp_path_factory.mktemp("apicurio")) as url:
            yield url


@pytest.fixture(scope="module")
def registry(url):
    registry = ConfluentRegistry(url, Topics(PREFIX))
    registry.register(published.all_published())
    registry.load()
    yield registry
    registry.close()


@pytest.fixture
def in_use(registry):
    schemas.use_registry(registry)
    yield registry
    schemas.use_registry(None)


def test_registering_again_changes_nothing(registry):
    first = registry.register(published.all_published())
    assert not any(one.new for one in first)
    assert len({one.subject for one in first}) == len({schema.name for schema in published.all_published()})
    assert f"{PREFIX}events.contact-event-afluente.contact_event.v1.PurchaseCompleted" in {one.subject for one in first}
    assert f"{PREFIX}events.custom-afluente.custom.v1.Event" in {one.subject for one in first}
    assert registry.register(published.all_published(), dry_run=True) == first


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.event_type}-{n}" for n, s in enumerate(SAMPLES)])
def test_new_records_carry_the_registrys_ids_and_are_read_by_them(in_use, sample):
    value = schemas.encode(sample)
    schema_id = codec.schema_id_of(value)
    assert schema_id < 0x40000000
    assert schemas.decode(value).payload == schemas.decode(value).payload
    assert json.loads(sample.payload) == schemas.decode(value).payload

    schema_registry.use(None, PREFIX, writes=True)
    committed = schemas.encode(sample)
    assert committed[5:] == value[5:]
    with pytest.raises(UnknownSchemaError, match="none is configured"):
        schemas.decode(value)


def test_committed_ids_are_read_whatever_registry_is_configured(in_use):
    schema_registry.use(None, PREFIX, writes=True)
    committed = schemas.encode(SAMPLES[0])
    schemas.use_registry(in_use)
    assert schemas.decode(committed).payload == RECORDED


def test_schema_id_that_the_registry_does_not_know_is_unknown(in_use):
    with pytest.raises(UnknownSchemaError, match="does not know it either"):
        schemas.decode(b"\0" + (9_999_999).to_bytes(4, "big") + b"x")


def test_unfit_rows_are_refused_with_a_registry_too(in_use):
    with pytest.raises(EncodeError):
        schemas.encode(row("message.read", {"message_id": "m"}))


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.event_type}-{n}" for n, s in enumerate(SAMPLES)])
def test_bytes_are_those_of_the_confluent_serializer(in_use, url, sample):
    value = schemas.encode(sample)
    _, record = codec.decode_record(value)
    text = in_use.schema_of(codec.schema_id_of(value))
    options = {
        "auto.register.schemas": False,
        "use.latest.version": False,
        "subject.name.strategy": topic_record_subject_name_strategy,
    }
    context = SerializationContext(Topics(PREFIX).event(sample.event_type), MessageField.VALUE)
    with SchemaRegistryClient({"url": url}) as client:
        assert AvroSerializer(client, text, conf=options)(record, context) == value
        # and a generic reader with nothing but the registry gets the same record
        strategy = {"subject.name.strategy": topic_record_subject_name_strategy}
        assert AvroDeserializer(client, conf=strategy)(value, context) == record


def test_registry_without_our_schemas_is_refused_at_the_start(registry, url):
    with pytest.raises(Refused, match="lacks"):
        schema_registry.use(url, f"{PREFIX}elsewhere.", writes=True)


def test_process_that_writes_gets_everything_when_it_starts(registry, url):
    writer = schema_registry.use(url, PREFIX, writes=True)
    assert writer is not None
    writer.close()
    assert codec.schema_id_of(schemas.encode(SAMPLES[0])) < 0x40000000
    schemas.use_registry(None)


def test_process_that_only_reads_needs_nothing_registered_under_its_prefix(in_use, url):
    value = schemas.encode(SAMPLES[0])
    reader = schema_registry.use(url, f"{PREFIX}elsewhere.", writes=False)
    assert reader is not None
    assert schemas.decode(value).payload == RECORDED
    reader.close()


def test_registry_that_is_away_while_reading_is_no_fault_of_the_record():
    reader = schema_registry.use("http://127.0.0.1:9", PREFIX, writes=False)
    assert reader is not None
    with pytest.raises(Unavailable):
        schemas.decode(b"\0\0\0\0\5x")
    schema_registry.use(None, PREFIX, writes=True)
    reader.close()


def test_registry_that_is_away_is_said_so():
    with pytest.raises(Unavailable):
        schema_registry.use("http://127.0.0.1:9", PREFIX, writes=True)


@contextmanager
def registry_that_gives(schema_id):
    """Speaks just enough of the API to hand out one id; counts what was registered."""
    registered = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.split("?")[0].endswith("/versions"):
                registered.append(body)
                self._say(200, {"id": schema_id})
            else:
                self._say(404, {"error_code": 40403, "message": "Schema not found"})

        def _say(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", registered
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("schema_id", [0x40000000, 0x40000001, 0x7FFFFFFF])
def test_registry_that_hands_out_committed_ids_is_refused(schema_id):
    with registry_that_gives(schema_id) as (url, registered):
        registry = ConfluentRegistry(url, Topics())
        with pytest.raises(Refused, match="committed ones"):
            registry.register(published.all_published())
        registry.close()
    assert len(registered) == 1


def test_command_registers_and_says_what_it_did(processes, url):
    env = {"SCHEMA_REGISTRY_URL": url, "AFLUENTE_TOPIC_PREFIX": f"{PREFIX}by-command."}
    dry = processes.run("schemas", "register", "--dry-run", "--format", "json", env=env)
    assert dry.returncode == 0, dry.stderr
    assert all(one["new"] and one["schema_id"] is None for one in json.loads(dry.stdout))
    done = processes.run("schemas", "register", "--format", "json", env=env)
    assert done.returncode == 0, done.stderr
    assert all(one["new"] and one["schema_id"] < 0x40000000 for one in json.loads(done.stdout))
    again = processes.run("schemas", "register", "--format", "json", env=env)
    assert [one["new"] for one in json.loads(again.stdout)] == [False] * len(published.all_published())
    with registry_that_gives(0x40000000) as (bad, _):
        refused = processes.run("schemas", "register", "--url", bad)
    assert refused.returncode == 1
    assert "committed ones" in refused.stderr
    assert processes.run("schemas", "register", env={"SCHEMA_REGISTRY_URL": ""}).returncode == 2
