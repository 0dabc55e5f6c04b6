"""Reading between offsets that were taken once."""

import threading

from confluent_kafka import TopicPartition

from afluente import kafka
from afluente.kafka.reading import TopicReader, retained


def test_a_transaction_that_was_open_is_waited_for_and_what_came_later_left_out(topics):
    topic = f"{topics.prefix}read"
    topics.create(topic, partitions=2)
    places = [(topic, 0), (topic, 1)]
    plain = kafka.producer(topics.settings)
    plain.produce(topic, b"before", partition=0)
    plain.flush(10)
    writer = kafka.producer(topics.settings, transactional_id=f"{topics.prefix}reading")
    writer.init_transactions(10)
    writer.begin_transaction()
    writer.produce(topic, b"open", partition=0)
    writer.flush(10)
    admin = kafka.admin(topics.settings)
    held = retained(admin, places)
    assert [(held[place].first, held[place].end) for place in places] == [(0, 2), (0, 0)]
    assert held[places[1]].since is None
    plain.produce(topic, b"later", partition=0)
    plain.flush(10)

    found = []
    with TopicReader(topics.settings) as reader:

        def read():
            starts = dict.fromkeys(places, 0)
            found.extend(message.value() for message in reader.between(starts, {p: held[p].end for p in places}))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        writer.commit_transaction(10)
        thread.join(20)
        assert not thread.is_alive()
    assert found == [b"before", b"open"]

    (deleted,) = admin.delete_records([TopicPartition(*places[0], 1)]).values()
    deleted.result(10)
    now = retained(admin, places)[places[0]]
    assert now.first == 1
    assert now.since is not None
