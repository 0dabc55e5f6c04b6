"""What is posted: deliveries of the shapes that the demo's senders send, each with an id of its own, signed.

A fifth of them Shopify orders of 7 kB, the rest WhatsApp messages, Stripe events and Nuvemshop's thin webhooks; by
turns to the connections of several organizations. Every one is new: the receiver writes both rows for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg

from afluente import postgres
from afluente.local.senders import payload, sign
from afluente.secrets import Keyring
from bench.rows import add_organizations
from producers.ingest import channels

ORGANIZATIONS = 10
PEOPLE = 500
SECRET = "bench secret"
TURNS = ("whatsapp", "shopify", "whatsapp", "stripe", "nuvemshop")
_BODIES = {
    "whatsapp": "whatsapp/message_text",
    "shopify": "shopify/orders_paid",
    "stripe": "stripe/checkout.session.completed",
    "nuvemshop": "nuvemshop/order_paid",
}


@dataclass(frozen=True)
class Address:
    """A connection of the bench: where to post, and what the sender calls it."""

    source: str
    channel_id: UUID
    account: str


@dataclass(frozen=True)
class Post:
    """One delivery, signed."""

    address: Address
    body: bytes
    headers: Mapping[str, str]


def connect(url: str, keyring: Keyring) -> list[Address]:
    """Make the organizations and, for each, a connection to each sender."""
    addresses = []
    with psycopg.connect(url, autocommit=True) as admin:
        organizations = add_organizations(admin, ORGANIZATIONS)
    with postgres.connect(url) as conn:
        for number, organization in enumerate(organizations):
            for source, account in (
                ("shopify", f"loja-{number}.myshopify.com"),
                ("stripe", None),
                ("nuvemshop", str(1_000_000 + number)),
                ("whatsapp", str(106_540_352_240_000 + number)),
            ):
                channel_id = channels.add(
                    conn,
                    keyring,
                    organization_id=organization,
                    source=source,
                    secrets={"signature": SECRET.encode()},
                    external_id=account,
                )
                addresses.append(Address(source, channel_id, account or ""))
    return addresses


def requests(addresses: Sequence[Address], count: int) -> list[bytes]:
    """`count` HTTP requests, no two alike."""
    return [b"".join(_lines(post)) + post.body for post in posts(addresses, count)]


def posts(addresses: Sequence[Address], count: int, turns: Sequence[str] = TURNS) -> list[Post]:
    """`count` deliveries of these senders by turns, no two alike, of and to 500 people in each organization."""
    of = {source: [address for address in addresses if address.source == source] for source in _BODIES}
    templates = {source: payload(name) for source, name in _BODIES.items()}
    now = datetime.now(UTC)
    made = []
    for number in range(count):
        source = turns[number % len(turns)]
        address = of[source][number // len(turns) % len(of[source])]
        body, headers = _delivery(address, templates[source], number)
        made.append(Post(address, body, {**headers, **sign(source, body, SECRET, now)}))
    return made


def _delivery(address: Address, template: Mapping[str, Any], number: int) -> tuple[bytes, dict[str, str]]:
    person = number % PEOPLE
    phone, email = f"55119{80_000_000 + person}", f"pessoa{person}@example.com"
    body = json.loads(json.dumps(template))
    match address.source:
        case "shopify":
            body |= {"id": 5_550_000 + number, "name": f"#{number}", "email": email, "phone": f"+{phone}"}
            body["customer"] |= {"id": 7_000_000 + person, "email": email, "phone": f"+{phone}"}
            headers = {
                "User-Agent": "Shopify-Captain-Hook",
                "X-Shopify-Topic": "orders/paid",
                "X-Shopify-Shop-Domain": address.account,
                "X-Shopify-API-Version": "2025-04",
                "X-Shopify-Webhook-Id": str(uuid4()),
                "X-Shopify-Event-Id": str(uuid4()),
            }
            return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(), headers
        case "stripe":
            body["id"] = f"evt_{uuid4().hex}"
            session = body["data"]["object"]
            session |= {"id": f"cs_{number}", "payment_intent": f"pi_{number}", "customer": f"cus_{person}"}
            session["customer_details"] |= {"email": email, "phone": f"+{phone}"}
            return json.dumps(body, ensure_ascii=False, indent=2).encode(), {"User-Agent": "Stripe/1.0"}
        case "nuvemshop":
            body |= {"store_id": int(address.account), "id": 871_000_000 + number}
            return json.dumps(body, separators=(",", ":")).encode(), {}
    value = body["entry"][0]["changes"][0]["value"]
    value["metadata"]["phone_number_id"] = address.account
    value["contacts"][0]["wa_id"] = phone
    value["messages"][0] |= {"id": f"wamid.{uuid4().hex}", "from": phone}
    return json.dumps(body, separators=(",", ":")).encode(), {"User-Agent": "facebookexternalua"}


def _lines(post: Post) -> Iterator[bytes]:
    yield f"POST /webhooks/{post.address.source}/{post.address.channel_id} HTTP/1.1\r\n".encode()
    yield b"Host: hooks.example.com\r\nAccept: */*\r\nContent-Type: application/json\r\n"
    yield b"Content-Length: %d\r\n" % len(post.body)
    for name, value in post.headers.items():
        yield f"{name}: {value}\r\n".encode()
    yield b"\r\n"
