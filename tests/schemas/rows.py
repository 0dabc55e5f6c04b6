"""Rows as event_log would hold them, for the codec's tests."""

import json
from datetime import UTC, datetime
from uuid import UUID

import orjson

from schemas import Row

ORGANIZATION = UUID("7f3c1d2e-5b6a-4c8d-9e0f-112233445566")
ENTITY = UUID("0193f2a0-0000-7000-8000-00000000beef")
CREATED_AT = datetime(2026, 12, 1, 12, 30, 15, 123456, tzinfo=UTC)


def row(event_type, payload, metadata=None, *, seq=7, created_at=CREATED_AT, entity_id=ENTITY):
    """``payload`` and ``metadata`` are JSON values, or bytes to be taken as they are."""
    return Row(
        seq=seq,
        id=UUID("0193f2a0-1111-7000-8000-000000000001"),
        organization_id=ORGANIZATION,
        event_type=event_type,
        entity_kind=event_type.split(".")[0],
        entity_id=entity_id,
        payload=payload if isinstance(payload, bytes) else _text(payload),
        metadata=metadata if isinstance(metadata, bytes) else _text(metadata or {}),
        created_at=created_at,
    )


def _text(value):
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False).encode()


RECORDED: dict = {
    "contact_event_id": "0193f2a0-2222-7000-8000-000000000002",
    "contact_id": str(ENTITY),
    "contact_event_type": "purchase_completed",
    "metric_name": "Order Paid",
    "category": "ecommerce",
    "source_type": "EXTERNAL",
    "source": "shopify",
    "external_event_id": "order_paid:1001",
    "unique_event_id": "shopify:order:order_paid:1001",
    "object_id": None,
    "object_id_ref": "1001",
    "entity_type": "order",
    "entity_id": None,
    "value": "297.90",
    "currency": "BRL",
    "occurred_at": "2026-11-29T12:00:00.000001+00:00",
    "received_at": "2026-11-29T12:00:01.000000+00:00",
    "properties": {
        "productId": "632910392",
        "productName": "Café torrado 500 g",
        "amount": "297.90",
        "currency": "BRL",
        "paymentMethod": "pix",
        "items": [{"productId": "632910392", "quantity": 2, "price": "148.95", "grams": 500}],
        "order_number": 1001,
    },
}
