"""The senders as the demo plays them: payloads of their shapes with values of our own, signed and posted as they
do.

The order of deliveries is as bad as in life: a refund comes before its order, a twin before the purchase it repeats,
`read` before `delivered`. Shops of different organizations have orders with the same ids, on purpose.

What is realistic here is what a receiver can trip over: the headers, what is signed, and the bytes. Meta escapes
non-ASCII and slashes, Stripe sends indented JSON, Shopify UTF-8.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any
from zoneinfo import ZoneInfo

from producers.ingest import mapping

SAO_PAULO = ZoneInfo("America/Sao_Paulo")
POST_WITHIN_S = 20.0
NUVEMSHOP_TOKEN = "demo-token"


@dataclass(frozen=True)
class Channel:
    """Where a sender posts, and what it signs with. `account` is what it calls the connection."""

    source: str
    url: str
    secret: str
    organization: str
    account: str


@dataclass(frozen=True)
class Post:
    """One delivery, ready to be sent. `note` says what a person should expect of it."""

    channel: Channel
    topic: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    note: str = ""
    expect_status: int = 200


def story(channels: Sequence[Channel], now: datetime | None = None) -> list[Post]:
    """Every delivery of the story, in the order it is sent: what each channel's sender has to say, side by side; then a
    repeat, one whose signature does not fit, and a WhatsApp POST for several numbers at once."""
    at = (now or datetime.now(UTC)).replace(microsecond=0)
    told = [list(_TELLERS[channel.source](channel, at, number)) for number, channel in enumerate(channels)]
    posts = [said[place] for place in range(max(map(len, told), default=0)) for said in told if place < len(said)]
    first = next((post for post in posts if post.channel.source == "shopify"), None)
    if first is not None:
        posts.append(replace(first, note="the same delivery again: a repeat"))
        tampered = first.body.replace(b"example.com", b"example.org")
        posts.append(
            replace(first, body=tampered, note="changed on the way: its signature does not fit", expect_status=401)
        )
    numbers = [channel for channel in channels if channel.source == "whatsapp"]
    if len(numbers) > 1:
        posts.append(_batch(numbers, at))
    return posts


def resources(channels: Sequence[Channel], now: datetime | None = None) -> dict[str, Any]:
    """What the Nuvemshop stand-in is told: the store of the token, and what its thin webhooks point to."""
    at = (now or datetime.now(UTC)).astimezone(SAO_PAULO) - timedelta(minutes=15)
    stores = [channel for channel in channels if channel.source == "nuvemshop"]
    order, customer = payload("nuvemshop/resource_order"), payload("nuvemshop/resource_customer")
    for name in ("created_at", "paid_at", "updated_at"):
        order[name] = at.strftime("%Y-%m-%dT%H:%M:%S%z")  # without the colon, as the API writes it
    return {
        # One token opens one store; the demo has one.
        "tokens": {NUVEMSHOP_TOKEN: stores[0].account} if stores else {},
        "resources": {f"orders/{order['id']}": order, f"customers/{customer['id']}": customer},
    }


def payload(name: str) -> dict[str, Any]:
    """A payload by its path under `payloads/`, without `.json`."""
    text = (files("afluente.local") / "payloads" / f"{name}.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def sign(source: str, body: bytes, secret: str, at: datetime) -> dict[str, str]:
    """The signature header of a sender."""
    key = secret.encode()
    match source:
        case "shopify":
            return {"X-Shopify-Hmac-Sha256": base64.b64encode(_hmac(key, body)).decode()}
        case "nuvemshop":
            return {"x-linkedstore-hmac-sha256": _hmac(key, body).hex()}
        case "whatsapp":
            return {"X-Hub-Signature-256": f"sha256={_hmac(key, body).hex()}"}
        case "typeform":
            return {"Typeform-Signature": f"sha256={base64.b64encode(_hmac(key, body)).decode()}"}
        case "hotmart":
            return {"X-HOTMART-HOTTOK": secret}
        case "evolution":
            return {"X-Webhook-Secret": secret}
        case "waha":
            return {
                "X-Webhook-Hmac": hmac.new(key, body, hashlib.sha512).hexdigest(),
                "X-Webhook-Hmac-Algorithm": "sha512",
                "X-Webhook-Timestamp": str(int(at.timestamp() * 1000)),
            }
        case "generic":  # as the mapping `courier` says
            stamp = str(int(at.timestamp()))
            return {"X-Timestamp": stamp, "X-Signature": f"sha256={_hmac(key, f'{stamp}.'.encode() + body).hex()}"}
        case "stripe":
            timestamp = int(at.timestamp())
            return {"Stripe-Signature": f"t={timestamp},v1={_hmac(key, f'{timestamp}.'.encode() + body).hex()}"}
    raise ValueError(f"no sender is called {source!r}")


def send(post: Post, timeout_s: float = POST_WITHIN_S) -> int:
    """Post one delivery; returns the answer's status. OSError when there is no answer."""
    headers = {"Content-Type": "application/json", **post.headers}
    request = urllib.request.Request(post.channel.url, data=post.body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def _shopify(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    def told(name: str, topic: str, minutes: int, note: str = "", /, **changed: Any) -> Post:
        body = payload(f"shopify/{name}") | changed
        at = (now + timedelta(minutes=minutes)).astimezone(SAO_PAULO).isoformat()
        for moment in ("created_at", "processed_at", "updated_at", "cancelled_at"):
            if body.get(moment):
                body[moment] = at
        return _shopify_post(channel, now, topic, body, note)

    second: dict[str, Any] = {"id": 5550002, "name": "#1002", "order_number": 1002}
    yield told("customers_create", "customers/create", -50)
    yield told("orders_create", "orders/create", -45)
    yield told("orders_paid", "orders/paid", -41)
    yield told("fulfillments_create", "fulfillments/create", -20)
    yield told("orders_fulfilled", "orders/fulfilled", -19)
    yield told("refunds_create", "refunds/create", -5, "comes before its order", order_id=5550002, id=890002)
    yield told("orders_create", "orders/create", -35, "paid at once", financial_status="paid", **second)
    yield told("orders_paid", "orders/paid", -35, "twin of the paid order", **second)
    yield told("orders_cancelled", "orders/cancelled", -6, **second)
    yield told("checkouts_create", "checkouts/create", -30)
    yield told("products_update", "products/update", -25, "nothing for contacts")
    if number == 0:
        yield told("customers_data_request", "customers/data_request", -3)
        yield told("unknown_shape", "orders/create", -2, "a shape that nobody knows: kept, shown, replayable")


def _shopify_post(channel: Channel, now: datetime, topic: str, body: dict[str, Any], note: str) -> Post:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = {
        "User-Agent": "Shopify-Captain-Hook",
        "X-Shopify-Topic": topic,
        "X-Shopify-Shop-Domain": channel.account,
        "X-Shopify-API-Version": "2025-04",
        "X-Shopify-Webhook-Id": str(uuid.uuid4()),
        "X-Shopify-Event-Id": str(uuid.uuid4()),
        "X-Shopify-Triggered-At": now.isoformat().replace("+00:00", "Z"),
        **sign("shopify", raw, channel.secret, now),
    }
    return Post(channel, topic, headers, raw, note)


def _stripe(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    events = (
        ("charge.succeeded", "a twin: the session is the purchase"),
        ("checkout.session.completed", ""),
        ("customer.created", "comes after the purchase"),
        ("checkout.session.completed.boleto", "ordered, not paid yet"),
        ("checkout.session.async_payment_succeeded", "the boleto is paid"),
        ("customer.subscription.created", ""),
        ("invoice.paid", "first month of the subscription"),
        ("charge.refunded", "a part of it"),
        ("customer.subscription.deleted", ""),
    )
    for place, (name, note) in enumerate(events):
        body = payload(f"stripe/{name}")
        at = now - timedelta(minutes=30 - place)
        body |= {"id": f"evt_AFL{number}{place:04d}", "created": int(at.timestamp())}
        raw = json.dumps(body, ensure_ascii=False, indent=2).encode()
        headers = {"User-Agent": "Stripe/1.0 (+https://stripe.com/docs/webhooks)"}
        yield Post(channel, body["type"], headers | sign("stripe", raw, channel.secret, now), raw, note)


def _nuvemshop(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    for name, note in (
        ("order_created", "says where to look, and no more"),
        ("order_paid", ""),
        ("order_updated", "collapsed if the order was fetched since"),
        ("customer_created", ""),
        ("product_updated", ""),
    ):
        body = payload(f"nuvemshop/{name}") | {"store_id": int(channel.account)}
        raw = json.dumps(body, separators=(",", ":")).encode()
        yield Post(channel, body["event"], sign("nuvemshop", raw, channel.secret, now), raw, note)


def _whatsapp(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    for place, (name, note) in enumerate(
        (
            ("message_text", ""),
            ("message_image", "the same conversation"),
            ("message_button", ""),
            ("message_from_ad", "a number without its ninth digit"),
            ("message_stop", "nothing more may be sent"),
            ("status_read", "comes before delivered"),
            ("status_delivered", ""),
            ("status_failed", "the 24-hour window is over"),
            ("user_preferences_resume", ""),
        )
    ):
        body = _of_number(payload(f"whatsapp/{name}"), channel, now - timedelta(minutes=10 - place), str(number))
        value = body["entry"][0]["changes"][0]["value"]
        topic = next(kind for kind in _KINDS if kind in value)
        yield _meta_post(channel, topic, body, now, note)


_KINDS = ("messages", "statuses", "user_preferences")


def _batch(channels: Sequence[Channel], now: datetime) -> Post:
    """One POST with messages for several numbers, as Meta sends them; it goes to the first one's address."""
    parts = [
        _of_number(payload("whatsapp/message_text"), channel, now, f"b{place}")
        for place, channel in enumerate(channels)
    ]
    body = {**parts[0], "entry": [entry for part in parts for entry in part["entry"]]}
    return _meta_post(channels[0], "messages", body, now, f"one POST for {len(channels)} numbers")


def _of_number(body: dict[str, Any], channel: Channel, at: datetime, suffix: str) -> dict[str, Any]:
    """The delivery with this number, with ids and times of its own."""
    value = body["entry"][0]["changes"][0]["value"]
    value["metadata"]["phone_number_id"] = channel.account
    for kind in _KINDS:
        for item in value.get(kind, ()):
            seconds = int(at.timestamp())
            item["timestamp"] = seconds if kind == "user_preferences" else str(seconds)
            if "id" in item:
                item["id"] = f"{item['id']}-{suffix}"
    return body


def _meta_post(channel: Channel, topic: str, body: dict[str, Any], now: datetime, note: str) -> Post:
    # As Meta sends it: non-ASCII and slashes escaped. The signature is over these bytes.
    raw = json.dumps(body, separators=(",", ":")).replace("/", "\\/").encode()
    headers = {"User-Agent": "facebookexternalua"} | sign("whatsapp", raw, channel.secret, now)
    return Post(channel, topic, headers, raw, note)


def _hotmart(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    for place, (name, note) in enumerate(
        (
            ("PURCHASE_OUT_OF_SHOPPING_CART", ""),
            ("PURCHASE_COMPLETE", "a twin that comes before its purchase"),
            ("PURCHASE_APPROVED", ""),
            ("PURCHASE_REFUNDED", ""),
        )
    ):
        body = payload(f"hotmart/{name}")
        bought, told = (int((now - timedelta(minutes=ago)).timestamp() * 1000) for ago in (40, 20 - place))
        body["creation_date"] = told
        if purchase := body["data"].get("purchase"):
            purchase |= {"order_date": bought, "approved_date": bought}
        raw = json.dumps(body, ensure_ascii=False).encode()
        yield Post(channel, body["event"], sign("hotmart", raw, channel.secret, now), raw, note)


def _typeform(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    body = payload("typeform/form_response")
    at = (now - timedelta(minutes=8)).strftime("%Y-%m-%dT%H:%M:%SZ")
    body["form_response"] |= {"form_id": channel.account, "landed_at": at, "submitted_at": at}
    raw = json.dumps(body).encode()
    yield Post(channel, body["event_type"], sign("typeform", raw, channel.secret, now), raw)


def _waha(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    for place, (name, note) in enumerate(
        (
            ("message", "a number without its ninth digit"),
            ("message_any", "a twin of the message"),
            ("message_stop", "nothing more may be sent"),
            ("session_status", "the phone is to be linked again"),
        )
    ):
        at = now - timedelta(minutes=9 - place)
        body = payload(f"waha/{name}") | {"session": channel.account, "timestamp": int(at.timestamp() * 1000)}
        if "timestamp" in body["payload"]:
            body["payload"]["timestamp"] = int((now - timedelta(minutes=9)).timestamp())
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        yield Post(channel, body["event"], sign("waha", raw, channel.secret, now), raw, note)


def _evolution(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    for name, note in (
        ("messages_upsert", "a hidden number, and the phone behind it"),
        ("messages_upsert_group", "a group is nobody's contact"),
        ("connection_update", "the phone is to be linked again"),
    ):
        at = now - timedelta(minutes=7)
        body = payload(f"evolution/{name}") | {"instance": channel.account, "date_time": at.isoformat()}
        if "messageTimestamp" in body["data"]:
            body["data"]["messageTimestamp"] = int(at.timestamp())
        raw = json.dumps(body, ensure_ascii=False).encode()
        yield Post(channel, body["event"], sign("evolution", raw, channel.secret, now), raw, note)


def _courier(channel: Channel, now: datetime, number: int) -> Iterator[Post]:
    """A sender that nobody wrote code for: its fields are named by the mapping that the connection keeps."""
    for place, sample in enumerate(mapping.samples("courier").values()):
        at = now - timedelta(minutes=18 - place)
        shipment = sample["shipment"] | {"order_number": "1001"}
        body = sample | {"id": f"trk-{place}", "occurred_at": at.isoformat(), "shipment": shipment}
        raw = json.dumps(body, ensure_ascii=False).encode()
        yield Post(channel, body["status"], sign("generic", raw, channel.secret, now), raw)


_TELLERS = {
    "shopify": _shopify,
    "stripe": _stripe,
    "nuvemshop": _nuvemshop,
    "whatsapp": _whatsapp,
    "hotmart": _hotmart,
    "typeform": _typeform,
    "waha": _waha,
    "evolution": _evolution,
    "generic": _courier,
}


def _hmac(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, hashlib.sha256).digest()
