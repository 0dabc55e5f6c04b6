"""Which partition an organization's records are in: the Java client's murmur2, so that every producer agrees.

librdkafka's default partitioner is CRC32 and agrees with Java only by chance, so producers set
``partitioner=murmur2_random`` or pass the partition computed here. What must stay true: the vectors in the test, for
every partition count. Null and empty keys are refused: a record without an organization has no home, and a random one
would hide the mistake.
"""

from functools import lru_cache
from uuid import UUID

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit hash of ``data`` as the Java client computes it, as an unsigned number."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _M & _MASK
        k ^= k >> 24
        h = (h * _M & _MASK) ^ (k * _M & _MASK)
    if length != whole:
        h ^= int.from_bytes(data[whole:], "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    return h ^ (h >> 15)


# An organization's records come by the million and an entity's by the dozen: both are worth remembering.
@lru_cache(maxsize=65_536)
def _positive_hash(data: bytes) -> int:
    """Java's ``toPositive(murmur2(data))``: the sign bit is cleared, not negated."""
    return murmur2(data) & 0x7FFFFFFF


def partition_for(key: bytes, partitions: int, entity_id: UUID | str | None = None, spread: int = 1) -> int:
    """The partition, from 0, of a record with this key on a topic with that many partitions.

    ``spread`` is k of a hot organization: its records go to k partitions, chosen by ``entity_id``, so that one entity's
    events stay in order. Records without an entity stay on the first of the k.
    """
    if not key:
        raise ValueError("a record needs a key: the organization id as text")
    if partitions < 1:
        raise ValueError(f"a topic has at least one partition, not {partitions}")
    if not 1 <= spread <= partitions:
        raise ValueError(f"spread must be between 1 and the {partitions} partitions, not {spread}")
    base = _positive_hash(key)
    if spread > 1 and entity_id is not None:
        base += _positive_hash(str(entity_id).encode()) % spread
    return base % partitions
