"""The published vectors of both header sets, and the reference library of Standard Webhooks as a second opinion."""

import base64
import hashlib
import hmac
import time

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from consumers.outbound import signature

DELIVERY = "209f529f-3a34-5ccb-9486-5e20cd48fb45"
BODY = (
    b'{"event":"lead.created","occurred_at":"2026-01-01T00:00:00.000Z","happened_at":"2025-12-31T21:00:00.000Z",'
    b'"delivery_id":"209f529f-3a34-5ccb-9486-5e20cd48fb45","data":{"lead":{"id":"lead-1"}}}'
)


def test_published_vector_of_x_webhook_signature():
    signed = signature.webhook_signature(["segredo-de-exemplo-nao-use-em-producao"], DELIVERY, 1767225600, BODY)
    assert signed == "t=1767225600,v1=bccb00c040649c7e2618d9cd4a3bc79ade96d5dd939c0fb11f26064c538e57a5"


def test_published_vector_of_standard_webhooks():
    signed = signature.standard_signature(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_new_secrets_have_the_shown_form_and_differ():
    first, second = signature.new_secret(), signature.new_secret()
    assert first != second
    assert first.startswith("whsec_")
    assert len(signature.secret_bytes(first)) == 32


def test_the_reference_library_accepts_what_either_of_two_rotating_secrets_signed():
    new, old, foreign = (signature.new_secret() for _ in range(3))
    now = int(time.time())
    headers = signature.headers(
        [new, old], delivery_id=DELIVERY, event_type="lead.created", attempt=2, timestamp=now, body=BODY
    )
    for secret in (new, old):
        assert Webhook(secret).verify(BODY, headers)["event"] == "lead.created"
    with pytest.raises(WebhookVerificationError):
        Webhook(foreign).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(new).verify(BODY + b" ", headers)


def test_two_rotating_secrets_both_sign_x_webhook_signature_with_the_whole_shown_string():
    new, old = signature.new_secret(), signature.new_secret()
    headers = signature.headers(
        [new, old], delivery_id=DELIVERY, event_type="lead.created", attempt=1, timestamp=7, body=BODY
    )
    expected = [
        hmac.new(secret.encode(), b"7." + DELIVERY.encode() + b"." + BODY, hashlib.sha256).hexdigest()
        for secret in (new, old)
    ]
    assert headers["X-Webhook-Signature"] == f"t=7,v1={expected[0]},v1={expected[1]}"


def test_headers_say_one_thing_in_both_sets():
    headers = signature.headers(
        [signature.new_secret()],
        delivery_id=DELIVERY,
        event_type="lead.created",
        attempt=3,
        timestamp=1767225600,
        body=BODY,
    )
    assert headers["webhook-id"] == headers["X-Webhook-Delivery"] == DELIVERY
    assert headers["webhook-timestamp"] == headers["X-Webhook-Timestamp"] == "1767225600"
    assert headers["X-Webhook-Attempt"] == "3"
    assert headers["X-Webhook-Event"] == "lead.created"


def test_another_attempt_has_another_signature():
    secret = signature.new_secret()
    assert signature.webhook_signature([secret], DELIVERY, 1, BODY) != signature.webhook_signature(
        [secret], DELIVERY, 2, BODY
    )


@pytest.mark.parametrize("bad", ["", "whsec_", "plain", "whsec_not base64!", "whsec_YQ="])
def test_a_secret_of_another_form_is_refused_without_being_shown(bad):
    with pytest.raises(signature.SecretError) as caught:
        signature.secret_bytes(bad)
    assert str(caught.value) == "the secret is not of the form whsec_<base64>"


def test_nothing_is_sent_unsigned():
    with pytest.raises(signature.SecretError):
        signature.headers([], delivery_id=DELIVERY, event_type="lead.created", attempt=1, timestamp=1, body=b"")


def test_the_key_of_the_standard_set_is_the_decoded_bytes():
    raw = bytes(range(32))
    shown = "whsec_" + base64.b64encode(raw).decode()
    expected = base64.b64encode(hmac.new(raw, b"id.5." + BODY, hashlib.sha256).digest()).decode()
    assert signature.standard_signature([shown], "id", 5, BODY) == f"v1,{expected}"
