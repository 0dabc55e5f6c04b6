import pytest

from tests.producers.relay.oracle import Reader, Writers


@pytest.fixture
def writers(database):
    return Writers(database)


@pytest.fixture
def reader(topics):
    topics.create_families()
    reader = Reader(topics)
    yield reader
    reader.close()
