"""Webhooks as Shopify, Nuvemshop, Stripe and WhatsApp send them: bodies of their shapes, signed and posted like theirs.

For the demo and for whoever tries a set-up by hand. It shares no code with the receiver: a mistake there must not be
repeated here. The people are invented, their numbers lie in unassigned ranges, and no value is taken from a real
delivery.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

BRASILIA = timezone(timedelta(hours=-3))
NAMES = uuid.UUID("8f0b6c2e-2f6c-5d7b-9c47-6a1c2b7b9d10")


@dataclass(frozen=True)
class Channel:
    """A connection as the sender knows it. `account`: shop domain, store id, account id or phone_number_id."""

    source: str
    url: str
    secret: str
    organization: str
    account: str


@dataclass(frozen=True)
class Post:
    """One delivery, ready to send. `note`: what is odd about it on purpose, or ''."""

    channel: Channel
    topic: str
    headers: dict[str, str]
    body: bytes
    note: str = ""
    expect_status: int = 200


@dataclass(frozen=True)
class Person:
    number: int
    name: str
    phone: str
    """As WhatsApp writes it: digits with the country code, the ninth digit as that account has it."""

    @property
    def first_name(self) -> str:
        return self.name.split()[0]

    @property
    def last_name(self) -> str:
        return self.name.split()[-1]

    @property
    def email(self) -> str:
        return f"{self.first_name}.{self.last_name}@example.com".lower()


PEOPLE = (
    Person(1, "Helena Duarte", "5511900010101"),
    Person(2, "Igor Sampaio", "5521900020202"),
    Person(3, "Joana Prates", "556280030303"),  # no ninth digit: she and +5562980030303 are one person
    Person(4, "Lucas Antunes", "555180040404"),
    Person(5, "Mirela Fontes", "5511900050505"),
)


def send(post: Post, timeout_s: float = 10.0) -> int:
    """Post it; returns the HTTP status. OSError when nobody answers."""
    url = urlsplit(post.channel.url)
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port or 80, timeout=timeout_s)
    try:
        connection.request(
            "POST", url.path, body=post.body, headers={**post.headers, "Content-Type": "application/json"}
        )
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


# --- the four senders: how each encodes, signs and labels a body


def shopify(channel: Channel, topic: str, body: dict[str, Any], at: datetime) -> Post:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    delivery = str(uuid.uuid5(NAMES, f"{channel.account}:{topic}:{body.get('id')}"))
    return Post(
        channel,
        topic,
        {
            "User-Agent": "Shopify-Captain-Hook",
            "X-Shopify-Topic": topic,
            "X-Shopify-Shop-Domain": channel.account,
            "X-Shopify-API-Version": "2025-10",
            "X-Shopify-Webhook-Id": delivery,
            "X-Shopify-Event-Id": str(uuid.uuid5(NAMES, f"event:{delivery}")),
            "X-Shopify-Triggered-At": at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
            "X-Shopify-Hmac-Sha256": base64.b64encode(_hmac(channel, raw)).decode(),
        },
        raw,
    )


def nuvemshop(channel: Channel, event: str, identifier: int) -> Post:
    raw = json.dumps({"store_id": int(channel.account), "event": event, "id": identifier}).encode()
    return Post(channel, event, {"X-Linkedstore-Hmac-Sha256": _hmac(channel, raw).hex()}, raw)


def stripe(channel: Channel, kind: str, thing: dict[str, Any], at: datetime) -> Post:
    event = {
        "id": "evt_" + _token(f"{channel.account}:{kind}:{thing['id']}"),
        "object": "event",
        "api_version": "2025-09-30.clover",
        "created": int(at.timestamp()),
        "data": {"object": thing},
        "livemode": True,
        "pending_webhooks": 1,
        "request": {"id": None, "idempotency_key": None},
        "type": kind,
    }
    raw = json.dumps(event, indent=2, ensure_ascii=False).encode()
    stamp = str(int(at.timestamp()))
    signature = _hmac(channel, f"{stamp}.".encode() + raw).hex()
    headers = {
        "User-Agent": "Stripe/1.0 (+https://stripe.com/docs/webhooks)",
        "Stripe-Signature": f"t={stamp},v1={signature}",
    }
    return Post(channel, kind, headers, raw)


def whatsapp(channel: Channel, topic: str, *entries: dict[str, Any]) -> Post:
    # Meta escapes what is not ASCII, slashes too, and signs those bytes.
    text = json.dumps({"object": "whatsapp_business_account", "entry": list(entries)}, separators=(",", ":"))
    raw = text.replace("/", "\\/").encode()
    return Post(channel, topic, {"X-Hub-Signature-256": f"sha256={_hmac(channel, raw).hex()}"}, raw)


# --- what they send


def shopify_order(
    number: int, person: Person, total: str, at: datetime, *, paid: bool, cancelled: bool = False
) -> dict[str, Any]:
    stamp = at.astimezone(BRASILIA).isoformat(timespec="seconds")
    price = {
        "shop_money": {"amount": total, "currency_code": "BRL"},
        "presentment_money": {"amount": total, "currency_code": "BRL"},
    }
    return {
        "id": 5_400_000_000_000 + number,
        "admin_graphql_api_id": f"gid://shopify/Order/{5_400_000_000_000 + number}",
        "name": f"#{number}",
        "order_number": number,
        "email": person.email,
        "phone": None,
        "created_at": stamp,
        "processed_at": stamp,
        "updated_at": stamp,
        "cancelled_at": stamp if cancelled else None,
        "cancel_reason": "customer" if cancelled else None,
        "currency": "BRL",
        "presentment_currency": "BRL",
        "financial_status": "paid" if paid else "pending",
        "fulfillment_status": None,
        "payment_gateway_names": ["pix"],
        "source_name": "web",
        "test": False,
        "subtotal_price": total,
        "total_price": total,
        "total_price_set": price,
        "total_discounts": "0.00",
        "total_tax": "0.00",
        "customer": {
            "id": 7_100_000_000_000 + person.number,
            "email": person.email,
            "first_name": person.first_name,
            "last_name": person.last_name,
            "phone": f"+{person.phone}",
            "verified_email": True,
            "currency": "BRL",
        },
        "billing_address": {"name": person.name, "phone": f"+{person.phone}", "city": "Campinas", "country_code": "BR"},
        "line_items": [
            {
                "id": 14_000_000_000_000 + number,
                "product_id": 8_800_000_000_001,
                "variant_id": 8_800_000_000_101,
                "title": "Caneca esmaltada",
                "sku": "CAN-ESM-01",
                "quantity": 2,
                "price": f"{float(total) / 2:.2f}",
                "requires_shipping": True,
            }
        ],
    }  # fmt: skip


def shopify_refund(number: int, total: str, at: datetime) -> dict[str, Any]:
    return {
        "id": 930_000_000_000 + number,
        "order_id": 5_400_000_000_000 + number,
        "created_at": at.astimezone(BRASILIA).isoformat(timespec="seconds"),
        "note": "cliente desistiu",
        "refund_line_items": [],
        "transactions": [
            {"id": 660_000_000_000 + number, "order_id": 5_400_000_000_000 + number, "kind": "refund",
             "status": "success", "amount": total, "currency": "BRL", "gateway": "pix"}
        ],
    }  # fmt: skip


def shopify_checkout(number: int, person: Person, total: str, at: datetime) -> dict[str, Any]:
    stamp = at.astimezone(BRASILIA).isoformat(timespec="seconds")
    return {
        "id": 33_000_000_000_000 + number,
        "token": _token(f"checkout:{number}"),
        "cart_token": _token(f"cart:{number}"),
        "email": person.email,
        "phone": f"+{person.phone}",
        "created_at": stamp,
        "updated_at": stamp,
        "completed_at": None,
        "currency": "BRL",
        "total_price": total,
        "line_items": [{"product_id": 8_800_000_000_002, "title": "Bule de ágata", "quantity": 1, "price": total}],
        "customer": {"id": 7_100_000_000_000 + person.number, "email": person.email, "first_name": person.first_name,
                     "last_name": person.last_name, "phone": f"+{person.phone}"},
    }  # fmt: skip


def shopify_customer(person: Person, at: datetime) -> dict[str, Any]:
    stamp = at.astimezone(BRASILIA).isoformat(timespec="seconds")
    return {
        "id": 7_100_000_000_000 + person.number,
        "admin_graphql_api_id": f"gid://shopify/Customer/{7_100_000_000_000 + person.number}",
        "email": person.email,
        "phone": f"+{person.phone}",
        "first_name": person.first_name,
        "last_name": person.last_name,
        "created_at": stamp,
        "updated_at": stamp,
        "state": "enabled",
        "verified_email": True,
        "tax_exempt": False,
        "currency": "BRL",
        "addresses": [],
    }


def nuvemshop_order(number: int, person: Person, total: str, at: datetime, *, status: str) -> dict[str, Any]:
    """The REST resource behind a thin `order/...` webhook. `status`: pending, paid or cancelled."""
    stamp = at.astimezone(BRASILIA).strftime("%Y-%m-%dT%H:%M:%S%z")
    return {
        "id": number,
        "number": number % 10_000,
        "name": f"#{number % 10_000}",
        "token": _token(f"nuvemshop:{number}"),
        "status": "cancelled" if status == "cancelled" else "open",
        "payment_status": "paid" if status == "paid" else "pending",
        "shipping_status": "unshipped",
        "cancel_reason": "customer" if status == "cancelled" else None,
        "created_at": stamp,
        "updated_at": stamp,
        "paid_at": stamp if status == "paid" else None,
        "cancelled_at": stamp if status == "cancelled" else None,
        "currency": "BRL",
        "subtotal": total,
        "discount": "0.00",
        "price": total,
        "total": total,
        "gateway": "pagseguro",
        "payment_details": {"method": "pix", "installments": "1"},
        "products": [
            {"product_id": 77_001, "variant_id": 77_101, "name": "Vaso de barro", "price": total, "quantity": 1}
        ],
        "customer": {"id": 440_000 + person.number, "name": person.name, "email": person.email,
                     "phone": f"+{person.phone}", "identification": None},
        "contact_name": person.name,
        "contact_email": person.email,
        "contact_phone": f"+{person.phone}",
    }  # fmt: skip


def stripe_checkout(number: int, person: Person, amount: int, at: datetime) -> dict[str, Any]:
    return {
        "id": f"cs_live_{_token(f'cs:{number}')}",
        "object": "checkout.session",
        "amount_subtotal": amount,
        "amount_total": amount,
        "created": int(at.timestamp()),
        "currency": "brl",
        "customer": f"cus_{_token(f'cus:{person.number}')}",
        "customer_details": {"email": person.email, "name": person.name, "phone": f"+{person.phone}", "tax_ids": []},
        "livemode": True,
        "metadata": {"product_id": "curso-ceramica", "product_name": "Curso de cerâmica"},
        "mode": "payment",
        "payment_intent": f"pi_{_token(f'pi:{number}')}",
        "payment_method_types": ["card"],
        "payment_status": "paid",
        "status": "complete",
        "subscription": None,
    }


def stripe_invoice(number: int, person: Person, amount: int, at: datetime) -> dict[str, Any]:
    return {
        "id": f"in_{_token(f'in:{number}')}",
        "object": "invoice",
        "amount_due": amount,
        "amount_paid": amount,
        "billing_reason": "subscription_cycle",
        "created": int(at.timestamp()),
        "currency": "brl",
        "customer": f"cus_{_token(f'cus:{person.number}')}",
        "customer_email": person.email,
        "customer_name": person.name,
        "customer_phone": f"+{person.phone}",
        "livemode": True,
        "metadata": {},
        "parent": {"type": "subscription_details",
                   "subscription_details": {"subscription": f"sub_{_token(f'sub:{person.number}')}", "metadata": {}}},
        "status": "paid",
        "status_transitions": {"paid_at": int(at.timestamp())},
    }  # fmt: skip


def stripe_refund(number: int, person: Person, amount: int, at: datetime) -> dict[str, Any]:
    return {
        "id": f"ch_{_token(f'ch:{number}')}",
        "object": "charge",
        "amount": amount,
        "amount_captured": amount,
        "amount_refunded": amount,
        "billing_details": {"email": person.email, "name": person.name, "phone": f"+{person.phone}"},
        "captured": True,
        "created": int(at.timestamp()),
        "currency": "brl",
        "customer": f"cus_{_token(f'cus:{person.number}')}",
        "livemode": True,
        "metadata": {},
        "paid": True,
        "payment_intent": f"pi_{_token(f'pi:{number}')}",
        "refunded": True,
        "status": "succeeded",
    }


def stripe_customer(person: Person, at: datetime) -> dict[str, Any]:
    return {
        "id": f"cus_{_token(f'cus:{person.number}')}",
        "object": "customer",
        "created": int(at.timestamp()),
        "email": person.email,
        "name": person.name,
        "phone": f"+{person.phone}",
        "livemode": True,
        "metadata": {},
    }


def whatsapp_entry(channel: Channel, *values: dict[str, Any]) -> dict[str, Any]:
    """One account's changes: each value is put under the channel's number."""
    number = {"display_phone_number": f"5511{channel.account[-8:]}", "phone_number_id": channel.account}
    return {
        "id": f"9{channel.account[-14:]}",
        "changes": [
            {"value": {"messaging_product": "whatsapp", "metadata": number, **value}, "field": "messages"}
            for value in values
        ],
    }


def whatsapp_message(person: Person, number: int, at: datetime, text: str | None = None) -> dict[str, Any]:
    """A text, or a picture when there is no text."""
    content: dict[str, Any] = (
        {"type": "text", "text": {"body": text}}
        if text is not None
        else {
            "type": "image",
            "image": {"mime_type": "image/jpeg", "sha256": "q83vEjRWeJA=", "id": str(88_000_000 + number)},
        }
    )
    return {
        "contacts": [{"profile": {"name": person.name}, "wa_id": person.phone}],
        "messages": [
            {"from": person.phone, "id": wamid(person, number), "timestamp": str(int(at.timestamp())), **content}
        ],
    }  # fmt: skip


def whatsapp_status(person: Person, number: int, status: str, at: datetime) -> dict[str, Any]:
    return {
        "statuses": [
            {
                "id": wamid(person, number),
                "status": status,
                "timestamp": str(int(at.timestamp())),
                "recipient_id": person.phone,
            }
        ]
    }


def wamid(person: Person, number: int) -> str:
    """A message id as WhatsApp makes them: the person's number is in it, in base64."""
    return "wamid." + base64.b64encode(b"\x1d\x18\x0d" + person.phone.encode() + f"{number:012X}".encode()).decode()


# --- the story


def story(channels: Sequence[Channel], now: datetime) -> list[Post]:
    """The demo's deliveries, in order, the same for the same `now`. Channels wanted: each source at least once."""
    posts = [post for channel in channels for post in _told_by(channel, channels, now)]
    first = next(post for post in posts if post.topic == "orders/paid")
    posts.insert(posts.index(first) + 1, replace(first, note="duplicate"))
    forged = next(post for post in posts if post.topic == "charge.refunded")
    posts.append(replace(forged, body=forged.body.replace(b"brl", b"usd"), note="bad signature", expect_status=401))
    shop = next(channel for channel in channels if channel.source == "shopify")
    posts.append(replace(shopify(shop, "loyalty/points_expired", {"id": 1, "points": 120}, now), note="unknown shape"))
    return posts


def resources(channels: Sequence[Channel], now: datetime) -> dict[str, dict[str, Any]]:
    """What the Nuvemshop stand-in must serve for the story: `/v1/<store>/orders/<id>` to the resource."""
    stores = [channel for channel in channels if channel.source == "nuvemshop"]
    return {f"/v1/{store.account}/orders/{order['id']}": order for store in stores for order in _nuvemshop_orders(now)}


def _told_by(channel: Channel, channels: Sequence[Channel], now: datetime) -> Iterator[Post]:
    match channel.source:
        case "shopify":
            yield from _shopify_story(channel, now)
        case "nuvemshop":
            for order in _nuvemshop_orders(now):
                yield nuvemshop(channel, "order/created", order["id"])
                if order["payment_status"] == "paid":
                    yield nuvemshop(channel, "order/paid", order["id"])
                if order["status"] == "cancelled":
                    yield nuvemshop(channel, "order/cancelled", order["id"])
        case "stripe":
            yield from _stripe_story(channel, now)
        case "whatsapp":
            yield from _whatsapp_story(channel, channels, now)


def _shopify_story(channel: Channel, now: datetime) -> Iterator[Post]:
    helena, igor, joana, *_ = PEOPLE
    yield shopify(channel, "customers/create", shopify_customer(helena, now - timedelta(days=40)), now)
    # both shops have an order 1001
    for number, (person, total) in enumerate(((helena, "297.90"), (helena, "58.00"), (igor, "129.80")), start=1001):
        at = now - timedelta(days=30 - (number - 1001) * 9)
        yield shopify(channel, "orders/create", shopify_order(number, person, total, at, paid=False), at)
        paid = at + timedelta(minutes=4)
        yield shopify(channel, "orders/paid", shopify_order(number, person, total, paid, paid=True), paid)
    yield shopify(channel, "refunds/create", shopify_refund(1002, "58.00", now - timedelta(days=2)), now)
    cancelled = now - timedelta(days=1)
    yield shopify(channel, "orders/create", shopify_order(1004, joana, "75.00", cancelled, paid=False), cancelled)
    yield shopify(
        channel,
        "orders/cancelled",
        shopify_order(1004, joana, "75.00", cancelled, paid=False, cancelled=True),
        cancelled,
    )
    yield shopify(channel, "checkouts/create", shopify_checkout(9, igor, "189.00", now - timedelta(hours=3)), now)


def _nuvemshop_orders(now: datetime) -> list[dict[str, Any]]:
    _, igor, joana, lucas, _ = PEOPLE
    return [
        nuvemshop_order(871_000_001, lucas, "340.00", now - timedelta(days=5), status="paid"),
        nuvemshop_order(871_000_002, joana, "92.50", now - timedelta(days=4), status="paid"),
        nuvemshop_order(871_000_003, igor, "61.00", now - timedelta(days=3), status="cancelled"),
    ]


def _stripe_story(channel: Channel, now: datetime) -> Iterator[Post]:
    _, igor, _, lucas, mirela = PEOPLE
    yield stripe(channel, "customer.created", stripe_customer(mirela, now), now)
    yield stripe(channel, "checkout.session.completed", stripe_checkout(1, mirela, 49_900, now), now)
    yield stripe(channel, "checkout.session.completed", stripe_checkout(2, lucas, 12_050, now), now)
    yield stripe(channel, "invoice.paid", stripe_invoice(3, igor, 8_990, now), now)
    yield stripe(channel, "charge.refunded", stripe_refund(2, lucas, 12_050, now), now)


def _whatsapp_story(channel: Channel, channels: Sequence[Channel], now: datetime) -> Iterator[Post]:
    helena, igor, joana, lucas, _ = PEOPLE
    start = int(channel.account[-4:]) * 100
    said = (
        (helena, "Oi! A caneca azul ainda tem?"),
        (helena, "Quero duas, por favor 😊"),
        (joana, "Meu pedido já saiu?"),
        (lucas, None),
    )
    for number, (person, text) in enumerate(said, start=start):
        at = now - timedelta(minutes=60 - number % 60)
        yield whatsapp(channel, "message", whatsapp_entry(channel, whatsapp_message(person, number, at, text)))
    for status in ("sent", "delivered", "read"):
        yield whatsapp(
            channel, f"status {status}", whatsapp_entry(channel, whatsapp_status(helena, start + 50, status, now))
        )
    others = [other for other in channels if other.source == "whatsapp" and other != channel]
    if others and channel.account < others[0].account:
        # one POST for two numbers of two organizations: each gets its own part
        yield whatsapp(
            channel,
            "batch",
            whatsapp_entry(channel, whatsapp_message(igor, start + 60, now, "Boa tarde!")),
            whatsapp_entry(others[0], whatsapp_message(joana, start + 61, now, "Vocês entregam em Goiânia?")),
        )


def _hmac(channel: Channel, signed: bytes) -> bytes:
    return hmac.new(channel.secret.encode(), signed, hashlib.sha256).digest()


def _token(name: str) -> str:
    return base64.b32encode(hashlib.sha256(name.encode()).digest())[:24].decode().lower()
