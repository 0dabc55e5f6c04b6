"""The fixtures themselves: a broker that keeps what it is given, a database that is fresh and migrated."""

from afluente import kafka as clients


def test_topic_is_read_to_its_end_in_order(kafka, topics):
    topics.create("t.plain" + topics.prefix, partitions=1)
    producer = clients.producer(kafka.settings)
    for number in range(50):
        producer.produce("t.plain" + topics.prefix, str(number).encode())
    assert producer.flush(10) == 0
    records = topics.records("t.plain" + topics.prefix)
    assert [record.value() for record in records] == [str(number).encode() for number in range(50)]


def test_uncommitted_records_are_read_only_when_asked_for(kafka, topics):
    topic = topics.prefix + "transactions"
    topics.create(topic, partitions=2)
    producer = clients.producer(kafka.settings, transactional_id=topics.prefix + "tx")
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"committed", partition=0)
    producer.commit_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"aborted", partition=0)
    producer.flush(10)
    producer.abort_transaction(30)
    assert [record.value() for record in topics.records(topic)] == [b"committed"]
    everything = topics.records(topic, "read_uncommitted")
    assert [record.value() for record in everything] == [b"committed", b"aborted"]


def test_database_is_a_migrated_one_of_its_own(database):
    first = database.organization("Primeira")
    second = database.organization("Segunda")
    assert first != second
    assert database.execute("SELECT count(*) FROM organizations") == [(2,)]
