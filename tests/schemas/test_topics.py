"""The declaration of the topics: names, counts, retention."""

import pytest

from schemas import published
from schemas.catalogue import EVENTS
from schemas.topics import FAMILIES, RETRY_DELAYS_S, Topics, declared, family_of, partition_of

WORKERS = ["webhook-normalize-worker", "webhook-dispatch-worker"]


def test_every_event_type_of_the_catalogue_has_the_topic_of_its_family():
    topics = Topics()
    for event_type in EVENTS:
        before_the_dot = event_type.split(".")[0]
        assert topics.event(event_type) == f"events.{before_the_dot.replace('_', '-')}"
        assert family_of(event_type) in FAMILIES
    assert published.event_types() == set(EVENTS)
    assert {family_of(event_type) for event_type in EVENTS} | {"custom"} == set(FAMILIES)


@pytest.mark.parametrize("event_type", ["loyalty.points_earned", "lead.teleported", "custom.event", "custom.anything"])
def test_event_type_outside_the_catalogue_goes_to_custom(event_type):
    assert Topics().event(event_type) == "events.custom"


def test_names_carry_the_prefix():
    topics = Topics("stage.")
    assert topics.event("lead_activity.recorded") == "stage.events.lead-activity"
    assert topics.event("contact_event.recorded") == "stage.events.contact-event"
    assert topics.retry("a-worker", 30) == "stage.a-worker.retry.30s"
    assert topics.retry("a-worker", "now") == "stage.a-worker.retry.now"
    assert topics.dead_letter("a-worker") == "stage.a-worker.dead-letter"
    assert topics.positions == "stage.relay.positions"
    assert topics.relay_dead_letter == "stage.relay.dead-letter"
    assert all(name.startswith("stage.events.") for name in topics.families())
    assert all(spec.name.startswith("stage.") for spec in declared("test", WORKERS, "stage."))


def test_retry_topic_of_another_delay_is_refused():
    with pytest.raises(ValueError, match="31 s"):
        Topics().retry("a-worker", 31)


@pytest.mark.parametrize("environment", ["local", "test", "production"])
def test_every_topic_has_a_finite_retention_but_the_positions(environment):
    specs = {spec.name: spec for spec in declared(environment, WORKERS)}
    assert len(specs) == len(FAMILIES) + len(WORKERS) * (len(RETRY_DELAYS_S) + 2) + 2
    positions = specs.pop("relay.positions")
    assert positions.config["cleanup.policy"] == "compact"
    assert positions.partitions == 64
    for spec in specs.values():
        assert spec.config["cleanup.policy"] == "delete"
        assert 0 < int(spec.config["retention.ms"]) <= 31 * 86_400_000
    for spec in [*specs.values(), positions]:
        assert spec.config["message.timestamp.type"] == "LogAppendTime"
        assert spec.replication == (3 if environment == "production" else 1)
        assert spec.config["min.insync.replicas"] == ("2" if environment == "production" else "1")


@pytest.mark.parametrize("environment", ["local", "test", "production"])
def test_one_organization_has_the_same_partition_everywhere(environment):
    counts = {spec.partitions for spec in declared(environment, WORKERS) if spec.name != "relay.positions"}
    assert len(counts) == 1


def test_retry_topics_keep_records_twice_as_long_as_they_wait():
    for spec in declared("production", WORKERS):
        if ".retry." in spec.name:
            assert int(spec.config["retention.ms"]) >= 2 * 1000 * max(RETRY_DELAYS_S)


@pytest.mark.parametrize("environment", ["local", "test", "production"])
def test_a_record_that_an_event_topic_took_fits_every_topic_of_a_worker_with_64_kb_of_headers_more(environment):
    limits = {spec.name: int(spec.config.get("max.message.bytes", 0)) for spec in declared(environment, WORKERS)}
    events = max(limit for name, limit in limits.items() if name.startswith("events."))
    assert events == 1_048_588
    others = {name: limit for name, limit in limits.items() if not name.startswith("events.")}
    assert others.pop("relay.positions") == 0  # small records of the relay's own
    assert all(limit >= events + 65_536 for limit in others.values())


def test_organization_that_is_not_spread_has_one_partition():
    organization = "7f3c1d2e-5b6a-4c8d-9e0f-112233445566"
    assert {partition_of(organization, 24, entity) for entity in (None, "a", "b")} == {16}
