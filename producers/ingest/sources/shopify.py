"""Shopify: topic, shop and ids stand in headers that the signature does not cover.

The tenant is the channel in the URL; the shop's domain must agree with it (one app has one secret for all its shops).
The same merchant action carries one X-Shopify-Event-Id over all subscriptions; retries of one delivery carry one
X-Shopify-Webhook-Id. The topic is in the key: a test delivery sends the very same body under several topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afluente.errors import Refused
from producers.ingest import signature
from producers.ingest.sources import Part, Source, key, sha256, topic_of

HEADER = "x-shopify-hmac-sha256"
LEFT_AFTER_MIN = "left_after_min"


def route(body: bytes, headers: Mapping[str, str], url_topic: str | None) -> list[Part]:
    topic = topic_of(headers.get("x-shopify-topic"))
    delivery = headers.get("x-shopify-event-id") or headers.get("x-shopify-webhook-id") or f"body-{sha256(body)}"
    shop = headers.get("x-shopify-shop-domain")
    return [Part(topic=topic, dedupe_key=key(topic, delivery), external_id=shop.lower() if shop else None)]


def check_settings(settings: Mapping[str, Any]) -> None:
    """`left_after_min`: after so many minutes without a change a checkout is left."""
    minutes = settings.get(LEFT_AFTER_MIN)
    if minutes is not None and (
        isinstance(minutes, bool) or not isinstance(minutes, int) or not 1 <= minutes <= 10_080
    ):
        raise Refused(f"{LEFT_AFTER_MIN} must be a whole number of minutes, 1 to 10080 (a week), not {minutes!r}")


SOURCE = Source(
    name="shopify",
    kind="ecommerce",
    verify=lambda body, headers, secrets, now_s: signature.shopify(body, headers.get(HEADER), secrets),
    verify_again=lambda body, headers, secrets: signature.shopify(body, headers.get(HEADER), secrets),
    route=route,
    check_settings=check_settings,
    kept_headers=frozenset(
        {
            HEADER, "x-shopify-topic", "x-shopify-shop-domain", "x-shopify-event-id",
            "x-shopify-webhook-id", "x-shopify-api-version", "x-shopify-test", "x-shopify-triggered-at",
        }
    ),
)  # fmt: skip
