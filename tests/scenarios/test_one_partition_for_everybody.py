"""S5: one organization is on one partition, whoever produces for it. The Java client's vectors: tests/schemas."""

from aiokafka.partitioner import DefaultPartitioner

from producers import EventProducer
from tests.fixtures.topics import PARTITIONS
from tests.producers.relay.running import relay_of

EVERYTHING = list(range(PARTITIONS))


def test_the_relay_and_a_service_put_an_organization_where_java_would(database, topics, writers, reader):
    organizations = writers.organizations + [database.organization(f"Loja {number}") for number in range(20)]
    for organization in organizations[4:]:
        writers.add(organization)
    with EventProducer(topics.settings, source="a-service") as service, database.connect() as conn:
        for organization in organizations:
            writers.emit(conn, organization)
            service.produce("probe.produced", organization_id=organization, entity_kind="probe", payload={"n": 1})
        service.flush()
        conn.commit()
    with relay_of(topics, database):
        reader.wait_for(2 * len(organizations))
    by_key = {}
    for record in reader.read_to_the_end():
        by_key.setdefault(record.key(), set()).add(record.partition())
    assert by_key == {
        key: {DefaultPartitioner()(key, EVERYTHING, EVERYTHING)}  # type: ignore[no-untyped-call]
        for key in (str(organization).encode() for organization in organizations)
    }
    assert len(set.union(*by_key.values())) > 1
