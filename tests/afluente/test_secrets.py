"""A sealed value opens for its own organization and purpose, and in no other way."""

import base64
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afluente.secrets import Keyring, SecretError

RING = Keyring.parse(Keyring.generate("k1"))
ids = st.uuids()


@given(plain=st.binary(max_size=300), organization=ids, purpose=st.text(max_size=40))
def test_what_was_sealed_opens(plain, organization, purpose):
    sealed = RING.seal(plain, organization_id=organization, purpose=purpose)
    assert RING.open(sealed, organization_id=organization, purpose=purpose) == plain
    assert sealed.isascii()


@given(plain=st.binary(max_size=50), owner=ids, other=ids, purpose=st.text(max_size=20), another=st.text(max_size=20))
def test_another_organization_or_purpose_does_not_open_it(plain, owner, other, purpose, another):
    sealed = RING.seal(plain, organization_id=owner, purpose=purpose)
    if other != owner:
        with pytest.raises(SecretError):
            RING.open(sealed, organization_id=other, purpose=purpose)
    if another != purpose:
        with pytest.raises(SecretError):
            RING.open(sealed, organization_id=owner, purpose=another)


@given(plain=st.binary(min_size=1, max_size=50), data=st.data())
def test_a_changed_byte_does_not_open(plain, data):
    owner = uuid.UUID(int=1)
    sealed = RING.seal(plain, organization_id=owner, purpose="p")
    key_id, _, encoded = sealed.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(encoded))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SecretError):
        RING.open(f"{key_id}.{base64.urlsafe_b64encode(bytes(raw)).decode()}", organization_id=owner, purpose="p")


@given(text=st.text(max_size=80))
def test_any_other_text_is_an_error_of_ours(text):
    with pytest.raises(SecretError):
        RING.open(text, organization_id=uuid.UUID(int=1), purpose="p")


def test_two_seals_of_one_secret_differ():
    owner = uuid.uuid4()
    assert len({RING.seal(b"x", organization_id=owner, purpose="p") for _ in range(100)}) == 100


def test_keys_rotate_the_first_seals_and_all_open():
    old, new = Keyring.generate("old"), Keyring.generate("new")
    owner = uuid.uuid4()
    sealed_before = Keyring.parse(old).seal(b"s", organization_id=owner, purpose="p")
    rotating = Keyring.parse(f"{new},{old}")
    assert rotating.open(sealed_before, organization_id=owner, purpose="p") == b"s"
    sealed_after = rotating.seal(b"s", organization_id=owner, purpose="p")
    assert sealed_after.startswith("new.")
    with pytest.raises(SecretError, match="'new', which is not in the ring"):
        Keyring.parse(old).open(sealed_after, organization_id=owner, purpose="p")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("k1", "not <key id>"),
        ("k1:####", "not base64"),
        ("k1:AAAA", "3 bytes, not 32"),
        ("k 1:" + base64.b64encode(bytes(32)).decode(), "key id"),
        (f"a:{base64.b64encode(bytes(32)).decode()},a:{base64.b64encode(bytes(32)).decode()}", "twice"),
    ],
)
def test_a_ring_that_cannot_be_read_is_refused_without_its_keys_in_the_message(text, says):
    with pytest.raises(SecretError, match=says) as error:
        Keyring.parse(text)
    assert "AAAA" not in str(error.value)
