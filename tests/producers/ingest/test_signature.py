"""The check vectors of each sender, and everything that must not pass."""

import base64
import hashlib
import hmac
import json

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


WAHA_BODY = b'{"event":"message","session":"default","engine":"WEBJS"}'
WAHA = (
    "208f8a55dde9e05519e898b10b89bf0d0b3b0fdf11fdbf09b6b90476301b98d8"
    "097c462b2b17a6ce93b6b47a136cf2e78a33a63f6752c2c1631777076153fa89"
)
NOW = 1_700_000_000


def waha(body, header, secrets):
    return signature.waha(body, header, "sha512", str(NOW * 1000), secrets, NOW)


def jwt(head, claims, secret=SECRET):
    signed = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (head, claims))
    digest = base64.urlsafe_b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).rstrip(b"=")
    return (signed + b"." + digest).decode()


HS256 = {"alg": "HS256", "typ": "JWT"}


def test_published_vector_of_waha_passes():
    assert waha(WAHA_BODY, WAHA, [b"another", b"my-secret-key"]).ok
    assert waha(WAHA_BODY, WAHA.upper(), [b"my-secret-key"]).ok
    assert waha(WAHA_BODY + b" ", WAHA, [b"my-secret-key"]).reason == "signature_mismatch"
    assert waha(WAHA_BODY, WAHA[:64], [b"my-secret-key"]).reason == "signature_malformed"
    assert waha(WAHA_BODY, None, [b"my-secret-key"]).reason == "signature_missing"
    assert waha(WAHA_BODY, WAHA, []).reason == "secret_unset"


@pytest.mark.parametrize(
    ("algorithm", "timestamp", "reason"),
    [
        ("sha512", None, None),
        (None, None, None),
        ("SHA512", str((NOW - 3600) * 1000), None),
        ("sha256", str(NOW * 1000), "algorithm_unknown"),
        ("sha512", str((NOW - 90_000) * 1000), "timestamp_too_old"),
        ("sha512", str((NOW + 90_000) * 1000), "timestamp_too_old"),
        ("sha512", "-1", "timestamp_malformed"),
        ("sha512", "9" * 400, "timestamp_malformed"),
    ],
)
def test_algorithm_and_clock_of_waha(algorithm, timestamp, reason):
    assert signature.waha(WAHA_BODY, WAHA, algorithm, timestamp, [b"my-secret-key"], NOW).reason == reason


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (jwt(HS256, {"iat": NOW, "exp": NOW + 600}), None),
        # a repeat of half an hour ago carries the first one's
        (jwt(HS256, {"exp": NOW - 1700}), None),
        (jwt(HS256, {"exp": NOW - 2000}), "token_too_old"),
        (jwt(HS256, {"exp": NOW + 600, "nbf": NOW + 9999}), "token_too_new"),
        (jwt(HS256, {"iat": NOW}), "token_malformed"),
        (jwt(HS256, {"exp": str(NOW)}), "token_malformed"),
        (jwt(HS256, {"exp": 1e999}), "token_malformed"),
        (jwt(HS256, {"exp": NOW + 600}, b"not ours"), "token_mismatch"),
        (jwt({"alg": "none"}, {"exp": NOW + 600}), "algorithm_unknown"),
        (jwt({"alg": "HS512"}, {"exp": NOW + 600}), "algorithm_unknown"),
        (jwt(HS256 | {"crit": ["exp"]}, {"exp": NOW + 600}), "algorithm_unknown"),
        (jwt(HS256, {"exp": NOW + 600}).rpartition(".")[0] + ".", "token_malformed"),
        (jwt([], {"exp": NOW}), "token_malformed"),
        ("a.b", "token_malformed"),
        ("é.é.é", "token_malformed"),
        ("", "token_missing"),
        (None, "token_missing"),
    ],
)
def test_json_web_token(token, reason):
    assert signature.jwt_hs256(token, [OTHER, SECRET], NOW).reason == reason


def test_json_web_token_of_no_secret():
    assert signature.jwt_hs256(jwt(HS256, {"exp": NOW + 600}, b""), [b""], NOW).reason == "secret_unset"


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
