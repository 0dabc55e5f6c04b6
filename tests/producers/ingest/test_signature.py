"""The check vectors of each sender, and everything that must not pass."""

import base64
import hashlib
import hmac

import pytest

from producers.ingest import signature

# 50 bytes; the accents matter
BODY = '{"id":"evt_1","name":"Conceição","amount":29790}'.encode()
SECRET = b"test_secret"
OTHER = b"another secret"
HEX = "4fc08b1610057515d630e62d3571995910ffbeccfabf8a085cd48b8479cc2b1c"
BASE64 = "T8CLFhAFdRXWMOYtNXGZWRD/vsz6v4oIXNSLhHnMKxw="
STRIPE = "cec843a4a6d014db4976e52b0f5f94b73ae620be734b9916036cc282e643daf7"
STRIPE_AT = 1_700_000_000


def stripe(body, header, secrets):
    return signature.stripe(body, header, secrets, STRIPE_AT)


VECTORS = {
    "shopify": (signature.shopify, BASE64),
    "nuvemshop": (signature.nuvemshop, HEX),
    "whatsapp": (signature.whatsapp, f"sha256={HEX}"),
    "stripe": (stripe, f"t={STRIPE_AT},v1={STRIPE}"),
}


@pytest.fixture(params=VECTORS, ids=list(VECTORS))
def sender(request):
    return VECTORS[request.param]


def test_body_of_the_vectors_is_50_bytes():
    assert len(BODY) == 50


def test_published_vector_passes(sender):
    check, header = sender
    assert check(BODY, header, [SECRET]).ok


def test_either_of_two_secrets_passes_while_one_rotates(sender):
    check, header = sender
    assert check(BODY, header, [OTHER, SECRET]).ok
    assert check(BODY, header, [SECRET, OTHER]).ok


def test_one_changed_byte_fails(sender):
    check, header = sender
    assert check(BODY.replace(b"29790", b"29791"), header, [SECRET]).reason == "signature_mismatch"


def test_body_that_was_serialised_again_fails(sender):
    check, header = sender
    assert not check(BODY.replace(b",", b", "), header, [SECRET]).ok


def test_wrong_secret_fails(sender):
    check, header = sender
    assert check(BODY, header, [OTHER]).reason == "signature_mismatch"


def test_missing_header_is_a_failed_check(sender):
    check, _ = sender
    assert check(BODY, None, [SECRET]).reason == "signature_missing"
    assert check(BODY, "", [SECRET]).reason == "signature_missing"


def test_unset_secret_is_a_failed_check(sender):
    check, header = sender
    assert check(BODY, header, []).reason == "secret_unset"


def test_empty_secret_never_passes(sender):
    check, _ = sender
    by_nothing = hmac.new(b"", BODY, hashlib.sha256)
    for header in (
        base64.b64encode(by_nothing.digest()).decode(),
        by_nothing.hexdigest(),
        f"sha256={by_nothing.hexdigest()}",
    ):
        assert not check(BODY, header, [b""]).ok
    signed = hmac.new(b"", f"{STRIPE_AT}.".encode() + BODY, hashlib.sha256).hexdigest()
    assert not signature.stripe(BODY, f"t={STRIPE_AT},v1={signed}", [b""], STRIPE_AT).ok


@pytest.mark.parametrize(
    "header",
    [
        "x",
        "sha256=",
        "sha256=zz",
        "sha1=" + HEX,
        HEX[:-1],
        "é" * 64,
        "=" * 44,
        "t=,v1=",
        "v1=" + STRIPE,
        "t=1,t=2,v1=" + STRIPE,
    ],
)
def test_odd_encoding_is_a_failed_check(sender, header):
    check, _ = sender
    assert not check(BODY, header, [SECRET]).ok


def test_hex_may_be_upper_case():
    assert signature.nuvemshop(BODY, HEX.upper(), [SECRET]).ok


def test_stripe_takes_any_v1_and_ignores_other_schemes():
    header = f"t={STRIPE_AT},v1={'0' * 64},v1={STRIPE},v0={'1' * 64},v9=x"
    assert stripe(BODY, header, [SECRET]).ok


def test_stripe_v0_alone_does_not_pass():
    assert stripe(BODY, f"t={STRIPE_AT},v0={STRIPE}", [SECRET]).reason == "signature_malformed"


@pytest.mark.parametrize("now", [STRIPE_AT + 301, STRIPE_AT - 301])
def test_stripe_signature_older_than_five_minutes_fails(now):
    header = f"t={STRIPE_AT},v1={STRIPE}"
    assert signature.stripe(BODY, header, [SECRET], now).reason == "signature_too_old"
    assert signature.stripe(BODY, header, [SECRET], now, tolerance_s=None).ok


def test_verify_token():
    assert signature.verify_token("abc", [b"xyz", b"abc"])
    assert not signature.verify_token("abc", [])
    assert not signature.verify_token(None, [b"abc"])
    assert not signature.verify_token("", [b""])
