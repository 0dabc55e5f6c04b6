"""Hotmart, Typeform and generic senders, as far as the receiver looks: proof, topic, key, and what is not kept."""

import base64
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afluente.errors import Refused
from producers.ingest import mapping, sources
from producers.ingest.sources import UNKNOWN, registered

SOURCES = registered()
HOTMART, TYPEFORM, GENERIC = SOURCES["hotmart"], SOURCES["typeform"], SOURCES["generic"]
# 50 bytes; the accents matter
BODY = '{"id":"evt_1","name":"Conceição","amount":29790}'.encode()
SECRET, OTHER = b"test_secret", b"another secret"
VECTOR = "T8CLFhAFdRXWMOYtNXGZWRD/vsz6v4oIXNSLhHnMKxw="
NOW = 1_700_000_000


def body_of(value):
    return json.dumps(value).encode()


# Hotmart


def test_hottok_of_the_header_passes_while_it_rotates():
    headers = {"x-hotmart-hottok": "old"}
    assert HOTMART.verify(BODY, headers, [b"old", b"new"], NOW).ok
    assert HOTMART.verify(BODY, headers, [b"new"], NOW).reason == "token_mismatch"
    assert HOTMART.verify(BODY, headers, [], NOW).reason == "secret_unset"
    assert HOTMART.verify(BODY, headers, [b""], NOW).reason == "secret_unset"
    assert HOTMART.verify(BODY, {}, [b"old"], NOW).reason == "token_missing"
    assert HOTMART.verify(BODY, {"x-hotmart-hottok": "óld"}, [b"old"], NOW).reason == "token_mismatch"


def test_hottok_of_older_bodies_passes_and_is_not_kept():
    body = '{"id": "1", "hottok" : "s3cret", "event": "PURCHASE_APPROVED", "name": "Conceição"}'.encode()
    assert HOTMART.verify(body, {}, [b"s3cret"], NOW).ok
    kept = HOTMART.without_secrets(body)
    assert b"s3cret" not in kept
    assert json.loads(kept) == json.loads(body) | {"hottok": "removed"}
    assert HOTMART.without_secrets(BODY) == BODY
    assert HOTMART.without_secrets(b"prod=1&hottok=s3cret&name=x") == b"prod=1&hottok=removed&name=x"
    assert HOTMART.without_secrets(rb'{"hottok": "s3\"cret", "a": 1}') == b'{"hottok": "removed", "a": 1}'
    # nor is its header, whatever else is kept
    assert HOTMART.kept_headers == frozenset()


def test_body_is_not_asked_when_the_header_says_something_else():
    body = body_of({"hottok": "right"})
    assert not HOTMART.verify(body, {"x-hotmart-hottok": "wrong"}, [b"right"], NOW).ok


def test_hotmart_is_known_by_the_events_id():
    (part,) = HOTMART.route(body_of({"id": "7fe7-1", "event": "PURCHASE_APPROVED"}), {}, None)
    assert (part.topic, part.dedupe_key) == ("PURCHASE_APPROVED", "event:7fe7-1")


def test_age_of_hotmarts_events_counts_where_the_connection_says_so():
    body = body_of({"creation_date": (NOW - 8 * 86_400) * 1000})
    headers, secrets = {"x-hotmart-hottok": "t"}, [b"t"]
    assert HOTMART.of({}).verify(body, headers, secrets, NOW).ok
    week = HOTMART.of({"max_age_days": 7})
    assert week.verify(body, headers, secrets, NOW).reason == "event_too_old"
    assert week.verify(body, headers, secrets, NOW - 2 * 86_400).ok
    assert week.verify(body_of({}), headers, secrets, NOW).ok
    assert week.verify(body, headers, [b"u"], NOW).reason == "token_mismatch"
    for days in (0, -1, "7", True):
        with pytest.raises(Refused, match="max_age_days"):
            HOTMART.check_settings({"max_age_days": days})


# Typeform


def test_vector_of_typeform():
    def check(header, secrets=(OTHER, SECRET)):
        return TYPEFORM.verify(BODY, {} if header is None else {"typeform-signature": header}, secrets, NOW)

    assert check(f"sha256={VECTOR}").ok
    assert check(f"sha256={VECTOR}", [OTHER]).reason == "signature_mismatch"
    assert check(f"sha256={VECTOR}", []).reason == "secret_unset"
    for header in (VECTOR, f"sha1={VECTOR}", "sha256=", "sha256=%%%", "sha256=" + "4fc0" * 16):
        assert not check(header).ok
    assert check(None).reason == "signature_missing"


def test_typeform_is_known_by_the_submission_not_by_the_event():
    response = {"form_id": "F1", "token": "t1"}
    keys = {
        TYPEFORM.route(
            body_of({"event_id": event, "event_type": "form_response", "form_response": response}), {}, None
        )[0].dedupe_key
        for event in ("a", "b")
    }
    assert keys == {"form_response:F1:t1"}
    (part,) = TYPEFORM.route(body_of({"event_type": "form_response"}), {}, None)
    assert (part.topic, part.dedupe_key[:5], part.external_id) == ("form_response", "body-", None)


def test_fields_of_typeform_are_names_and_refs():
    TYPEFORM.check_settings({"fields": {"phone": "a1b2"}})
    for fields in ({"telephone": "a"}, {"phone": 1}, {"phone": ""}, ["phone"]):
        with pytest.raises(Refused, match="fields"):
            TYPEFORM.check_settings({"fields": fields})


# Generic


def generic(verify, **more):
    given = {
        "source": "our_shop",
        "verify": verify,
        "topic": "event",
        "rules": [{"name": "all", "ignore": True}],
        **more,
    }
    mapping.read(given)
    return GENERIC.of({"mapping": given})


def digest(body=BODY, secret=SECRET, algorithm="sha256"):
    return hmac.new(secret, body, algorithm).digest()


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha384", "sha512"])
@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("hex", bytes.hex), ("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)],
)
def test_signature_in_each_algorithm_and_encoding(algorithm, encoding, encode):
    source = generic({"by": "hmac", "header": "X-Sig", "algorithm": algorithm, "encoding": encoding, "prefix": "v="})
    text = encode(digest(algorithm=algorithm))
    text = text if isinstance(text, str) else text.decode()
    good = {"x-sig": f"v={text}"}
    assert source.verify(BODY, good, [OTHER, SECRET], NOW).ok
    if encoding == "base64url":
        assert source.verify(BODY, {"x-sig": f"v={text.rstrip('=')}"}, [SECRET], NOW).ok
    assert source.verify(BODY + b" ", good, [SECRET], NOW).reason == "signature_mismatch"
    assert source.verify(BODY, good, [OTHER], NOW).reason == "signature_mismatch"
    assert source.verify(BODY, good, [], NOW).reason == "secret_unset"
    assert source.verify(BODY, {}, [SECRET], NOW).reason == "signature_missing"
    for header in (text, "v=", "v=é", f"v={text}x!", "v=" + " " * 50):
        assert not source.verify(BODY, {"x-sig": header}, [SECRET], NOW).ok


def test_timestamp_is_signed_and_old_ones_are_refused():
    source = generic(mapping.example("courier")["verify"])
    signed = f"{NOW}.".encode() + BODY
    headers = {"x-signature": f"sha256={digest(signed).hex()}", "x-timestamp": str(NOW)}
    assert source.verify(BODY, headers, [SECRET], NOW + 300).ok
    assert source.verify(BODY, headers, [SECRET], NOW + 301).reason == "signature_too_old"
    assert source.verify(BODY, headers, [SECRET], NOW - 301).reason == "signature_too_old"
    assert source.verify(BODY, headers | {"x-timestamp": str(NOW + 1)}, [SECRET], NOW).reason == "signature_mismatch"
    assert source.verify(BODY, {"x-signature": headers["x-signature"]}, [SECRET], NOW).reason == "signature_malformed"
    assert source.verify_again(BODY, headers, [SECRET]).ok


def test_timestamp_that_is_not_signed_must_still_be_one():
    source = generic({"by": "hmac", "header": "X-Sig", "timestamp": {"header": "X-At", "unit": "ms"}})
    headers = {"x-sig": digest().hex()}
    assert source.verify(BODY, headers | {"x-at": str(NOW * 1000)}, [SECRET], NOW).ok
    assert source.verify(BODY, headers, [SECRET], NOW).reason == "timestamp_missing"
    assert source.verify(BODY, headers | {"x-at": "now"}, [SECRET], NOW).reason == "timestamp_malformed"


def test_standard_webhooks_are_one_mapping():
    """Ids, times and several signatures, with a key that is written as base64."""
    key = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
    source = generic(
        {
            "by": "hmac", "header": "webhook-signature", "encoding": "base64", "prefix": "v1,", "separator": " ",
            "key": "base64", "timestamp": {"header": "webhook-timestamp"},
            "signed": "{header:webhook-id}.{timestamp}.{body}",
        }
    )  # fmt: skip
    signed = f"msg_1.{NOW}.".encode() + BODY
    good = base64.b64encode(digest(signed, base64.b64decode(key))).decode()
    old = base64.b64encode(digest(signed, b"old")).decode()
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(NOW), "webhook-signature": f"v1,{old} v1,{good} v2,x"}
    assert source.verify(BODY, headers, [f"whsec_{key}".encode()], NOW).ok
    assert source.verify(BODY, headers | {"webhook-id": "msg_2"}, [f"whsec_{key}".encode()], NOW).ok is False
    assert source.verify(BODY, headers, [b"whsec_not base64"], NOW).reason == "secret_unset"


def test_secret_that_the_mapping_cannot_use_is_refused_and_new_ones_can_be_used():
    for key in ("text", "base64", "hex"):
        settings = {"mapping": mapping.example("yampi") | {"verify": {"by": "hmac", "header": "X-Sig", "key": key}}}
        made = sources.generic.new_secret(settings).encode()
        GENERIC.check_secret(settings, made)
        (known,) = [found for found in [sources.generic._key(mapping.kept(settings).verify, made)] if found]
        header = {"x-sig": hmac.new(known, BODY, "sha256").hexdigest()}
        assert GENERIC.of(settings).verify(BODY, header, [made], NOW).ok
        if key != "text":
            with pytest.raises(Refused, match=f"is not {key}"):
                GENERIC.check_secret(settings, b"not it, surely")


def test_token_with_and_without_a_scheme():
    bearer = generic({"by": "token"})
    assert bearer.verify(BODY, {"authorization": "Bearer s3cret"}, [b"new", b"s3cret"], NOW).ok
    assert bearer.verify(BODY, {"authorization": "bearer s3cret"}, [b"s3cret"], NOW).ok
    assert bearer.verify(BODY, {"authorization": "Basic s3cret"}, [b"s3cret"], NOW).reason == "token_missing"
    assert bearer.verify(BODY, {"authorization": "s3cret"}, [b"s3cret"], NOW).reason == "token_missing"
    assert bearer.verify(BODY, {}, [b"s3cret"], NOW).reason == "token_missing"
    plain = generic({"by": "token", "header": "X-Token", "scheme": ""})
    assert plain.verify(BODY, {"x-token": "s3cret"}, [b"s3cret"], NOW).ok
    assert plain.verify(BODY, {"x-token": "other"}, [b"s3cret"], NOW).reason == "token_mismatch"


def test_connection_without_a_usable_mapping_verifies_nothing():
    for settings in ({}, {"mapping": {"source": "x"}}, {"mapping": 1}):
        source = GENERIC.of(settings)
        assert source.verify(BODY, {"authorization": "Bearer x"}, [b"x"], NOW).reason == "mapping_unusable"
        assert source.route(BODY, {}, None)[0].topic == UNKNOWN
    with pytest.raises(Refused, match="needs a mapping"):
        GENERIC.check_settings({})


def test_topic_and_delivery_are_read_by_the_mapping():
    source = generic({"by": "token"}, topic={"header": "X-Topic"}, delivery_id="id")
    part = source.route(body_of({"id": 2**63 + 1}), {"x-topic": "order/paid"}, None)[0]
    assert (part.topic, part.dedupe_key) == ("order/paid", f"order/paid:{2**63 + 1}")
    # what has no id is known by its bytes, and what has no topic is unknown
    part = source.route(body_of({"id": {}}), {}, None)[0]
    assert (part.topic, part.dedupe_key[:13]) == (UNKNOWN, "unknown:body-")


@given(st.binary(max_size=200), st.dictionaries(st.sampled_from(["x-signature", "x-timestamp", "x"]), st.text()))
def test_no_request_makes_a_receiver_fail(body, headers):
    for source in (HOTMART, TYPEFORM, GENERIC.of({"mapping": mapping.example("courier")})):
        assert source.verify(body, headers, [SECRET], NOW).ok is False
        assert len(source.route(source.without_secrets(body), headers, None)) == 1


def test_key_is_short_whatever_the_ids():
    for source, value in (
        (HOTMART, {"id": "x" * 1000, "event": "y" * 1000}),
        (TYPEFORM, {"event_type": "é" * 300, "form_response": {"form_id": "f" * 300, "token": "t" * 300}}),
        (GENERIC.of({"mapping": mapping.example("yampi")}), {"event": "e" * 300, "resource": {"id": "i" * 3000}}),
    ):
        (part,) = source.route(body_of(value), {}, None)
        assert len(part.dedupe_key) <= 200
        assert len(part.topic) <= 255


def test_vectors_hold_for_a_generic_sender_too():
    assert len(BODY) == 50
    yampi = generic(mapping.example("yampi")["verify"])
    assert yampi.verify(BODY, {"x-yampi-hmac-sha256": VECTOR}, [SECRET], NOW).ok
