"""Right payloads with junk in any place: missing, null, of another type, huge, nested. Nothing makes a normaliser fail,
and what it makes of them can be written down."""

import copy
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.emit import MAX_PAYLOAD_BYTES, to_json
from producers.ingest import mapping
from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize
from schemas.events.contact_event import PROPERTIES
from tests.consumers.workers import test_webhook_normalize_stripe as stripe
from tests.consumers.workers.test_webhook_normalize_checkouts import checkout
from tests.consumers.workers.test_webhook_normalize_shopify import REFUND
from tests.consumers.workers.test_webhook_normalize_shopify import order as shopify_order
from tests.producers.ingest.normalize import test_hotmart as hotmart
from tests.producers.ingest.normalize import test_typeform as typeform

RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)
SUBSCRIPTION = {"subscriber": {"code": "SUB9", "phone": {"dddCell": "62", "cell": "80030003"}}, "plan": {"id": 1}}

PARCEL = {
    "id": 7, "order_id": 1001, "shipment_status": "delivered", "tracking_number": "T1",
    "updated_at": "2026-11-20T10:00:00Z", "destination": {"phone": "81988887777", "country_code": "BR"},
}  # fmt: skip
STRIPE_SUBSCRIPTION = stripe.event(
    "customer.subscription.created", id="sub", items={"data": [{"price": {"id": "p", "unit_amount": 5}, "quantity": 2}]}
)
TOPICS = {
    "shopify order": "orders/paid",
    "shopify refund": "refunds/create",
    "shopify checkout": "checkouts/create",
    "shopify parcel": "fulfillments/update",
}

BASES = {
    "hotmart purchase": ("hotmart", hotmart.event(data={"subscription": SUBSCRIPTION}), {}),
    "hotmart refund": ("hotmart", hotmart.event("PURCHASE_REFUNDED", purchase={"status": "PARTIALLY_REFUNDED"}), {}),
    "hotmart cart": ("hotmart", hotmart.event("PURCHASE_OUT_OF_SHOPPING_CART"), {}),
    "hotmart cancellation": ("hotmart", hotmart.event("SUBSCRIPTION_CANCELLATION", data=SUBSCRIPTION), {}),
    "hotmart member": (
        "hotmart",
        hotmart.event("CLUB_MODULE_COMPLETED", data={"user": {"email": "a@example.com"}}),
        {},
    ),
    "typeform": (
        "typeform",
        typeform.event(
            hidden={"utm_source": "x"},
            calculated={"score": 3},
            definition={
                "title": "F",
                "fields": [{"id": "1", "ref": "q-name", "properties": {"fields": [{"id": "2"}]}}],
            },
        ),
        {"fields": {"name": "q-name"}},
    ),
    "yampi order": ("generic", mapping.samples("yampi")["order_delivered"], {"mapping": mapping.example("yampi")}),
    "yampi cart": ("generic", mapping.samples("yampi")["cart_left"], {"mapping": mapping.example("yampi")}),
    "shopify order": ("shopify", shopify_order(test=False), {}),
    "shopify refund": ("shopify", REFUND, {}),
    "shopify checkout": ("shopify", checkout(), {}),
    "shopify parcel": ("shopify", PARCEL, {}),
    "stripe session": ("stripe", stripe.session(), {}),
    "stripe invoice": ("stripe", stripe.invoice(lines={"data": [{"amount": 1, "price": {"product": "p"}}]}), {}),
    "stripe refund": ("stripe", stripe.event("charge.refunded", id="ch", amount_refunded=5, payment_intent="pi"), {}),
    "stripe subscription": ("stripe", STRIPE_SUBSCRIPTION, {}),
    "courier": ("generic", mapping.samples("courier")["in_transit"], {"mapping": mapping.example("courier")}),
}

_junk = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**30, 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["", "1e999", "9" * 400, "\u0000", "\ud800", "x" * 150_000, "2026-13-45T99:99:99Z", "-1", "R$ 1"])
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5), max_size=3)
    | st.sampled_from([json.loads("[" * 150 + "]" * 150), [{}] * 300])
)
MISSING = object()


def places(value, path=()):
    """Every place in a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield (*path, number)
            yield from places(inner, (*path, number))


def put(document, path, junk):
    *way, last = path
    try:
        for step in way:
            document = document[step]
        if junk is MISSING:
            del document[last]
        else:
            document[last] = copy.deepcopy(junk)
    except (KeyError, IndexError, TypeError):
        pass  # an earlier piece of junk stands in the way


@pytest.mark.parametrize("name", BASES)
@settings(max_examples=40)
@given(data=st.data())
def test_junk_anywhere_ends_in_a_named_outcome(name, data):
    source, base, own = BASES[name]
    document = copy.deepcopy(base)
    every = sorted(places(base), key=repr)
    for _ in range(data.draw(st.integers(1, 4))):
        put(document, data.draw(st.sampled_from(every)), data.draw(st.just(MISSING) | _junk))
    context = f.Context(topic=TOPICS.get(name, "x"), received_at=RECEIVED, test_channel=True, settings=own)
    result = normalize(source, json.dumps(document).encode(), {}, context)
    assert result.status in ("processed", "ignored", "unrecognised")
    assert 0 < len(result.reason) <= 255
    for fact in result.facts:
        writable(fact)


def writable(fact):
    """What the tables and the catalogue hold a fact against."""
    if isinstance(fact, f.CheckoutState):
        assert 0 < len(fact.token) <= 255
        return
    if isinstance(fact, f.OrderState):
        assert 0 < len(fact.external_id) <= 255
        assert fact.total >= 0
        assert all(moment is None or moment.tzinfo for moment in (fact.placed_at, fact.paid_at, fact.updated_at))
        return
    assert isinstance(fact, f.ContactEvent)
    assert 0 < len(fact.external_id) <= 255
    assert fact.entity_id is None or len(fact.entity_id) <= 255
    assert fact.object_id_ref is None or len(fact.object_id_ref) <= 255
    assert fact.value is None or fact.value.is_finite()
    assert fact.currency is None or len(fact.currency) == 3
    if fact.event_type is not None:
        PROPERTIES[fact.event_type].model_validate(dict(fact.properties))
    assert len(to_json(fact.properties, "properties").encode()) < MAX_PAYLOAD_BYTES
