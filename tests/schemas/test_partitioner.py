"""The vectors of scenario S5, and the spread of a hot organization."""

from uuid import uuid4

import pytest

from schemas.partitioner import murmur2, partition_for

VECTORS = [
    ("1", {6: 3, 12: 3, 24: 15}),
    ("42", {6: 4, 12: 4, 24: 4}),
    ("1001", {6: 0, 12: 0, 24: 12}),
    ("00000000-0000-0000-0000-000000000001", {6: 2, 12: 2, 24: 2}),
    ("7f3c1d2e-5b6a-4c8d-9e0f-112233445566", {6: 4, 12: 4, 24: 16}),
    ("org-eu-west", {6: 0, 12: 6, 24: 18}),
    ("Ünïcode-org", {6: 4, 12: 4, 24: 4}),
    ("fd7af248-ce5c-46a5-93d7-1c0c9005b99d", {32: 26}),
]


@pytest.mark.parametrize(("key", "partitions"), VECTORS)
def test_partition_is_the_java_clients(key, partitions):
    for count, expected in partitions.items():
        assert partition_for(key.encode(), count) == expected


def test_sign_bit_is_cleared_not_negated():
    negative = next(str(n).encode() for n in range(100) if murmur2(str(n).encode()) >> 31)
    assert partition_for(negative, 2**31) == murmur2(negative) - 2**31


@pytest.mark.parametrize("key", [b"", None])
def test_record_without_key_is_refused(key):
    with pytest.raises(ValueError, match="needs a key"):
        partition_for(key, 6)


def test_spread_uses_k_neighbouring_partitions_and_keeps_an_entity_on_one():
    key = b"7f3c1d2e-5b6a-4c8d-9e0f-112233445566"
    entities = [uuid4() for _ in range(200)]
    seen = {entity: partition_for(key, 24, entity, spread=4) for entity in entities}
    assert set(seen.values()) == {16, 17, 18, 19}
    assert all(partition_for(key, 24, str(entity), spread=4) == partition for entity, partition in seen.items())


def test_spread_is_by_the_formula_and_wraps_around():
    key, entity = b"fd7af248-ce5c-46a5-93d7-1c0c9005b99d", "42"
    organization, mine = murmur2(key) & 0x7FFFFFFF, murmur2(b"42") & 0x7FFFFFFF
    for partitions in (6, 12, 32):
        for spread in range(2, 7):
            assert partition_for(key, partitions, entity, spread) == (organization + mine % spread) % partitions


def test_record_without_entity_stays_on_the_first_partition_of_the_spread():
    assert partition_for(b"42", 6, None, spread=3) == 4


@pytest.mark.parametrize("spread", [0, 7])
def test_spread_beyond_the_partitions_is_refused(spread):
    with pytest.raises(ValueError, match="spread"):
        partition_for(b"42", 6, "e", spread)
