"""Every sample of the senders ends in a named outcome: asserted values, or kept or passed over on purpose.

The samples lie beside the repository, in ../shared/samples, and are read where they lie. A machine that has only the
repository has no samples to read: there the table itself is still held against its own rules.
"""

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from producers.ingest.normalize import facts as f
from producers.ingest.normalize import normalize
from schemas.contact_events import METRICS, metric_of
from schemas.events.contact_event import PROPERTIES

SAMPLES = Path(__file__).resolve().parents[5] / "shared" / "samples"
SENDERS = {
    "shopify": "shopify",
    "stripe": "stripe",
    "nuvemshop": "nuvemshop",
    "whatsapp_cloud": "whatsapp",
    "hotmart": "hotmart",
    "typeform": "typeform",
    "waha": "waha",
    "evolution": "evolution",
}
RECEIVED = datetime(2026, 11, 29, 12, tzinfo=UTC)

ORDER = "820982911946154508"
CHECKOUT = [("checkout_started:123123123", "421.88", "USD"), ("CheckoutState", "123123123", "421.88")]
CARLA = ["115310627314723954", "+5562980030003", "carla.nogueira@example.com"]

# Metrics that a sender makes up: their category is custom.
CUSTOM = {"Club First Access"}

# Sample -> status, reason, and what is asserted of its facts: (kind of fact, name, value, currency), in order.
EXPECTED = {
    # Shopify, on a test channel: these are its test deliveries, one body under every topic
    "shopify/app_uninstalled": ("processed", "channel_uninstalled", [("ChannelUninstalled",)]),
    "shopify/carts_create": ("ignored", "not_about_a_contact:carts/create", []),
    "shopify/carts_update": ("ignored", "not_about_a_contact:carts/update", []),
    "shopify/checkouts_create": ("processed", "checkout_started", CHECKOUT),
    "shopify/checkouts_update": ("processed", "checkout_started", CHECKOUT),
    "shopify/customers_create": (
        "processed", "customer_created", [("customer_created:706405506930370084", None, None)]),
    "shopify/customers_update": ("processed", "customer_updated", []),
    "shopify/customers_data_request": ("processed", "privacy_access", [("access", "9999")]),
    "shopify/customers_redact": ("processed", "privacy_redact", [("redact", "redact:191167:2026-11-29")]),
    "shopify/fulfillments_create": ("processed", "shipment_created", [("shipment_created:123456", None, None)]),
    "shopify/order_transactions_create": ("ignored", "not_about_a_contact:order_transactions/create", []),
    "shopify/orders_create": (
        "processed", "order_placed", [("OrderState", ORDER, "359.97"), (f"order_placed:{ORDER}", "359.97", "USD")]),
    "shopify/orders_paid": (
        "processed", "order_paid", [("OrderState", ORDER, "359.97"), (f"order_paid:{ORDER}", "359.97", "USD")]),
    "shopify/orders_cancelled": (
        "processed", "order_cancelled",
        [("OrderState", ORDER, "359.97"), (f"order_cancelled:{ORDER}", "359.97", "USD")]),
    "shopify/orders_fulfilled": (
        "processed", "order_fulfilled",
        [("OrderState", ORDER, "359.97"), (f"order_fulfilled:{ORDER}", "359.97", "USD")]),
    "shopify/products_create": ("ignored", "not_about_a_contact:products/create", []),
    "shopify/refunds_create": ("processed", "order_refunded", [("order_refunded:890088186047892319", "85.00", "USD")]),
    "shopify/with_headers/checkouts_create": (
        "processed", "checkout_started", CHECKOUT),
    "shopify/with_headers/customers_create": (
        "processed", "customer_created", [("customer_created:706405506930370084", None, None)]),
    "shopify/with_headers/orders_create": (
        "processed", "order_placed", [("OrderState", ORDER, "388.00"), (f"order_placed:{ORDER}", "388.00", "USD")]),
    "shopify/with_headers/orders_paid": (
        "processed", "order_paid", [("OrderState", ORDER, "388.00"), (f"order_paid:{ORDER}", "388.00", "USD")]),
    # Stripe, in test mode
    "stripe/charge.dispute.closed": ("ignored", "dispute_not_lost", []),
    "stripe/charge.dispute.created": ("ignored", "dispute_not_lost", []),
    "stripe/charge.failed": ("ignored", "not_paid", []),
    "stripe/charge.refunded": (
        "processed", "order_refunded", [("order_refunded:ch_Tk60iryACbyVPku2irYcq0Gp:100", "1.00", "USD")]),
    "stripe/charge.succeeded": ("ignored", "twin_of_the_checkout_or_invoice", []),
    "stripe/checkout.session.async_payment_succeeded.brl_boleto": (
        "processed", "order_paid", [("order_paid:pi_1PgafyB7WZ01zgkWSjxsAJo3", "297.90", "BRL")]),
    "stripe/checkout.session.completed.brl_paid": (
        "processed", "order_paid", [("order_paid:pi_1PgafyB7WZ01zgkWSjxsAJo3", "297.90", "BRL")]),
    "stripe/checkout.session.completed": (
        "processed", "order_paid", [("order_paid:pi_ORLPD0m3cSyteir10bnWDIRW", "30.00", "USD")]),
    "stripe/customer.created": ("processed", "customer_created", [("customer_created:cus_oWzx4X64Froxpc", None, None)]),
    "stripe/customer.deleted": ("ignored", "deleted_at_the_source", []),
    "stripe/customer.subscription.created": (
        "processed", "subscription_created", [("subscription_created:sub_pc69MEABzpCNrwvUTScK7033", None, None)]),
    "stripe/customer.subscription.deleted": (
        "processed", "subscription_cancelled", [("subscription_cancelled:sub_pc69MEABzpCNrwvUTScK7033", None, None)]),
    "stripe/customer.subscription.trial_will_end": ("ignored", "subscription_changed", []),
    "stripe/customer.subscription.updated": ("ignored", "subscription_changed", []),
    "stripe/customer.updated": ("processed", "customer_updated", []),
    "stripe/invoice.paid": ("processed", "order_paid", [("order_paid:pi_U9wABYcLZjCUr6FC3yYByHk9", "20.00", "USD")]),
    "stripe/invoice.paid.new_api_shape": (
        "processed", "order_paid", [("order_paid:in_1Pgc6tB7WZ01zgkWu9fdqL6I", "99.90", "BRL")]),
    "stripe/invoice.payment_failed": ("ignored", "not_paid", []),
    "stripe/payment_intent.canceled": ("ignored", "not_paid", []),
    "stripe/payment_intent.payment_failed": ("ignored", "not_paid", []),
    "stripe/payment_intent.succeeded": ("ignored", "twin_of_the_checkout_or_invoice", []),
    "stripe/price.created": ("ignored", "not_about_a_contact", []),
    "stripe/product.created": ("ignored", "not_about_a_contact", []),
    # amount_total 0 and amount_paid 0: a trial buys nothing
    "stripe/with_headers/checkout.session.completed.subscription_mode": ("processed", "checkout_subscription", []),
    "stripe/with_headers/invoice.paid": ("processed", "nothing_paid", []),
    "stripe/with_headers/customer.created": (
        "processed", "customer_created", [("customer_created:cus_NSPHp4fOlXGw8P", None, None)]),
    "stripe/with_headers/customer.subscription.created": (
        "processed", "subscription_created", [("subscription_created:sub_1MhUZrE0b6fckueSZfQ2Ytz6", None, None)]),
    # Nuvemshop: thin ones with the sample's resource
    "nuvemshop/app_uninstalled": ("processed", "channel_uninstalled", [("ChannelUninstalled",)]),
    "nuvemshop/customers_data_request": ("processed", "privacy_access", [("access", "456")]),
    "nuvemshop/customers_redact": ("processed", "privacy_redact", [("redact", "redact:1:2026-11-29")]),
    "nuvemshop/order_created": (
        "processed", "order_created",
        [("OrderState", "450789469", "58.00"), ("nuvemshop.order_created",),
         ("order_placed:450789469", "58.00", "USD")]),
    # the resource says pending and open: it has the last word
    "nuvemshop/order_paid": ("processed", "order_no_longer_paid", [("OrderState", "450789469", "58.00")]),
    "nuvemshop/order_cancelled": ("processed", "order_no_longer_cancelled", [("OrderState", "450789469", "58.00")]),
    "nuvemshop/order_updated": ("processed", "order_updated", [("OrderState", "450789469", "58.00")]),
    "nuvemshop/product_created": ("processed", "product_synced", [("ProductSynced", "87219151", "created")]),
    "nuvemshop/product_updated": ("processed", "product_synced", [("ProductSynced", "87219151", "updated")]),
    "nuvemshop/resource_order_pending": (
        "processed", "order_created",
        [("OrderState", "450789469", "58.00"), ("nuvemshop.order_created",),
         ("order_placed:450789469", "58.00", "USD")]),
    "nuvemshop/resource_customer": ("processed", "customer_created", [("customer_created:101", None, None)]),
    "nuvemshop/resource_abandoned_checkout": (
        "processed", "cart_abandoned",
        [("CartAbandoned", "411335234", 29135), ("checkout_abandoned:411335234", "291.35", "BRL")]),
    # Hotmart, partly its sandbox, which counts on a test channel
    "hotmart/CLUB_FIRST_ACCESS": (
        "processed", "club_first_access", [("club_first_access:7fe795fa-285c-430f-9a91-afce10a9216f", None, None)]),
    "hotmart/PURCHASE_APPROVED": (
        "processed", "order_paid",
        [("OrderState", "HP16015479281022", "1500.00"), ("order_paid:HP16015479281022", "1500.00", "BRL"),
         ("subscription_created:I9OT62C3", None, None)]),
    "hotmart/PURCHASE_APPROVED_subscription": (
        "processed", "order_paid",
        [("OrderState", "HP12345670000TEST", "100.00"), ("order_paid:HP12345670000TEST", "100.00", "USD"),
         ("subscription_created:SUB001", None, None)]),
    "hotmart/PURCHASE_CANCELED": (
        "processed", "order_cancelled",
        [("OrderState", "HP16015479281022", "1500.00"), ("order_cancelled:HP16015479281022", "1500.00", "BRL")]),
    # the same names as PURCHASE_APPROVED: it counts if that one never came
    "hotmart/PURCHASE_COMPLETE": (
        "processed", "order_paid",
        [("OrderState", "HP12345670000TEST", "100.00"), ("order_paid:HP12345670000TEST", "100.00", "USD"),
         ("subscription_created:SUB001", None, None)]),
    "hotmart/PURCHASE_EXPIRED": ("processed", "not_paid", [("OrderState", "HP16015479281022", "1500.00")]),
    "hotmart/PURCHASE_OUT_OF_SHOPPING_CART": (
        "processed", "checkout_abandoned", [("checkout_abandoned:2f6b9a3e-5d0c-4a77-9b1e-7c5d0a4f1e21", None, None)]),
    "hotmart/PURCHASE_PROTEST": ("processed", "refund_asked_for", [("OrderState", "HP16015479281022", "1500.00")]),
    "hotmart/PURCHASE_REFUNDED": (
        "processed", "order_refunded",
        [("OrderState", "HP12345670000TEST", "100.00"), ("order_refunded:HP12345670000TEST", "100.00", "USD")]),
    "hotmart/SUBSCRIPTION_CANCELLATION": (
        "processed", "subscription_cancelled", [("subscription_cancelled:SUB001", None, None)]),
    "typeform/form_response_br_phone_cpf_utm": (
        "processed", "form_submitted",
        [("form_submitted:FbFMsO5x:p7zn6z8fnns6o0kdj1p7zn6zs6ltyxr5", None, None)]),
    "typeform/form_response_file_upload_and_other_choice": (
        "processed", "form_submitted",
        [("form_submitted:Wudz4qvi:7l1zu7f9s6otmjchqcqkyeg7l1zu7f97", None, None)]),
    "typeform/form_response_official_with_hidden_and_variables": (
        "processed", "form_submitted", [("form_submitted:lT4Z3j:a3a12ec67a1365927098a606107fac15", None, None)]),
    # WhatsApp: (kind of fact, type or status, text)
    "whatsapp_cloud/batch_two_entries_two_numbers": (
        "processed", "message+status",
        [("text", "hi everyone!"), ("text", "Good afternoon"), ("delivered",), ("image", None)]),
    "whatsapp_cloud/button_quick_reply": ("processed", "message", [("button", "SIM")]),
    "whatsapp_cloud/interactive_button_reply": ("processed", "message", [("interactive", "title")]),
    "whatsapp_cloud/interactive_list_reply": ("processed", "message", [("interactive", "title")]),
    "whatsapp_cloud/message_audio_voice": ("processed", "message", [("audio", None)]),
    "whatsapp_cloud/message_contacts": ("processed", "message", [("contacts", "Person Ok")]),
    "whatsapp_cloud/message_contacts_three": (
        "processed", "message", [("contacts", "Chandler Bing, Monica, Rachel Green")]),
    "whatsapp_cloud/message_document": ("processed", "message", [("document", None)]),
    "whatsapp_cloud/message_edited": ("processed", "edit", [("edited", "Updated image caption")]),
    "whatsapp_cloud/message_forwarded_many_times": ("processed", "message", [("text", "text forwarded many times")]),
    "whatsapp_cloud/message_image": ("processed", "message", [("image", None)]),
    "whatsapp_cloud/message_image_with_url": ("processed", "message", [("image", None)]),
    "whatsapp_cloud/message_location": ("processed", "message", [("location", None)]),
    "whatsapp_cloud/message_location_named": ("processed", "message", [("location", "Facebook HQ")]),
    "whatsapp_cloud/message_order_catalog": ("processed", "message", [("order", None)]),
    "whatsapp_cloud/message_reaction": ("processed", "reaction", [("reaction", "👍")]),
    "whatsapp_cloud/message_reaction_removed": ("processed", "reaction", [("reaction", None)]),
    "whatsapp_cloud/message_referral_ctwa_ad": ("processed", "message", [("text", "BODY")]),
    "whatsapp_cloud/message_reply": ("processed", "message", [("text", "replied text")]),
    "whatsapp_cloud/message_revoked": ("processed", "revoke", [("revoked", None)]),
    "whatsapp_cloud/message_sticker": ("processed", "message", [("sticker", None)]),
    "whatsapp_cloud/message_text": ("processed", "message", [("text", "hi everyone!")]),
    "whatsapp_cloud/message_text_with_user_id": ("processed", "message", [("text", "Body Text")]),
    "whatsapp_cloud/message_unsupported": ("processed", "message", [("unsupported", None)]),
    "whatsapp_cloud/message_video_caption": ("processed", "message", [("video", "hello world")]),
    "whatsapp_cloud/phone_number_quality_update": ("ignored", "about_the_account:phone_number_quality_update", []),
    "whatsapp_cloud/status_sent": ("processed", "status", [("sent",)]),
    "whatsapp_cloud/status_delivered": ("processed", "status", [("delivered",)]),
    "whatsapp_cloud/status_read": ("processed", "status", [("read",)]),
    "whatsapp_cloud/status_played": ("processed", "status", [("played",)]),
    "whatsapp_cloud/status_failed_131047_reengagement": ("processed", "status", [("failed", "131047", False)]),
    "whatsapp_cloud/system_phone_number_change": ("processed", "number_changed", [("NumberChanged", "+5511900010099")]),
    "whatsapp_cloud/user_preferences_resume": ("processed", "preference", [("Preference", True)]),
    "whatsapp_cloud/user_preferences_signup": ("processed", "preference", [("Preference", True)]),
    # WAHA, likewise
    "waha/message_ack_device": ("processed", "status", [("delivered",)]),
    "waha/message_ack_read": ("processed", "status", [("read",)]),
    "waha/message_edited": ("processed", "edited", [("edited", "Oi, quero o plano pro")]),
    "waha/message_image": ("processed", "message", [("image", "Foto do produto")]),
    "waha/message_reaction": ("processed", "reaction", [("reaction", "🙏")]),
    "waha/message_reply": ("processed", "message", [("text", "Sim!")]),
    "waha/message_text": ("processed", "message", [("text", "Oi, quero saber mais sobre o plano enterprise")]),
    "waha/session_status_failed": ("processed", "session", [("loja-exemplo", "FAILED")]),
    "waha/session_status_working": ("processed", "session", [("loja-exemplo", "WORKING")]),
    # Evolution
    "evolution/connection_update": ("processed", "session", [("loja-exemplo", "FAILED")]),
    "evolution/contacts_update_array": ("ignored", "group", []),
    "evolution/contacts_upsert": ("processed", "contact", [("PersonNamed", "Carla Nogueira")]),
    "evolution/messages_update_delivery_ack": ("processed", "status", [("delivered",)]),
    "evolution/messages_update_read": ("processed", "status", [("read",)]),
    "evolution/messages_upsert_conversation": ("processed", "message", [("text", "hola - text")]),
    "evolution/messages_upsert_conversation_from_me": (
        "processed", "echo", [("sent", "text", "menasje saliente solo texto")]),
    "evolution/messages_upsert_extendedText_group": ("ignored", "group", []),
    "evolution/messages_upsert_image": ("processed", "message", [("image", "hola - text con multimedia (imagen)")]),
    "evolution/messages_upsert_image_from_me": (
        "processed", "echo", [("sent", "image", "mensaje saliente con multimedia (imagen)")]),
    "evolution/messages_upsert_lid_with_alt": ("processed", "message", [("text", "Teste envio de mensagem")]),
    "evolution/messages_upsert_sticker": ("processed", "message", [("sticker", None)]),
}  # fmt: skip


def described(fact):
    """What EXPECTED says of a fact."""
    match fact:
        case f.ContactEvent():
            value = None if fact.value is None else str(fact.value)
            return (fact.external_id, value, fact.currency)
        case f.OrderState():
            return ("OrderState", fact.external_id, str(fact.total))
        case f.CheckoutState():
            return ("CheckoutState", fact.token, str(fact.value))
        case f.OrderEvent():
            return (fact.event_type,)
        case f.CartAbandoned():
            return ("CartAbandoned", fact.cart_id, fact.value_minor)
        case f.ProductSynced():
            return ("ProductSynced", fact.product_id, fact.action)
        case f.PrivacyRequest():
            return (fact.request_type, fact.request_id)
        case f.IncomingMessage():
            return (fact.kind, fact.body)
        case f.OutgoingMessage():
            return ("sent", fact.kind, fact.body)
        case f.SessionChanged():
            return (fact.session, fact.status)
        case f.PersonNamed():
            return ("PersonNamed", fact.person.name)
        case f.MessageChange():
            return (fact.kind, fact.content.get("body", fact.content.get("emoji")))
        case f.MessageStatus():
            return (fact.status, fact.error_code, fact.retryable) if fact.error_code else (fact.status,)
        case f.NumberChanged():
            return ("NumberChanged", fact.new_identity.value)
        case f.Preference():
            return ("Preference", fact.granted)
        case f.ChannelUninstalled():
            return ("ChannelUninstalled",)
    raise AssertionError(fact)


def found():
    """Names of the samples that lie here."""
    return sorted(
        str(path.relative_to(SAMPLES).with_suffix(""))
        for sender in SENDERS
        for path in (SAMPLES / sender).rglob("*.json")
    )


def read(name):
    """A sample's topic, headers, body and resource, as the receiver and the fetch would have them."""
    document = json.loads((SAMPLES / f"{name}.json").read_text())
    headers = {}
    if "with_headers/" in name:
        headers, document = document["headers"], document["body"]
    sender, stem = name.split("/")[0], name.split("/")[-1]
    resource = None
    if sender == "shopify":
        first, _, rest = stem.partition("_")
        topic = "order_transactions/create" if stem.startswith("order_tr") else f"{first}/{rest}"
        topic = headers.get("x-shopify-topic", topic)
    elif sender == "stripe":
        topic = document["type"]
    elif sender == "nuvemshop":
        topic = document.get("event") or stem.replace("_", "/", 1)
        topics = {"resource_order_pending": "order/created", "resource_customer": "customer/created"}
        topics["resource_abandoned_checkout"] = "checkout/abandoned"
        if stem in topics:
            topic, resource = topics[stem], document
        elif topic.startswith("order/"):
            resource = json.loads((SAMPLES / "nuvemshop/resource_order_pending.json").read_text())
    elif sender in ("hotmart", "typeform"):
        topic = document.get("event") or document["event_type"]
    elif sender in ("waha", "evolution"):
        topic = document["event"]
    else:
        topic = "messages"
    return topic, headers, json.dumps(document).encode(), resource


def outcome(name, test_channel=True):
    topic, headers, body, resource = read(name)
    context = f.Context(
        topic=topic, received_at=RECEIVED, test_channel=test_channel, resource=resource, fetched=resource is not None
    )
    return normalize(SENDERS[name.split("/")[0]], body, headers, context)


def test_table_names_every_sample_that_lies_here():
    assert set(found()) <= set(EXPECTED)
    assert not SAMPLES.exists() or set(EXPECTED) == set(found())


@pytest.mark.parametrize("name", found())
def test_sample_ends_in_its_named_outcome(name):
    result = outcome(name)
    assert (result.status, result.reason, [described(fact) for fact in result.facts]) == EXPECTED[name]


@pytest.mark.parametrize("name", found())
def test_facts_of_a_sample_fit_the_catalogue(name):
    for fact in outcome(name).facts:
        if not isinstance(fact, f.ContactEvent):
            continue
        assert fact.event_type or fact.metric
        assert len(fact.external_id) <= 255
        assert fact.occurred_at.tzinfo is not None
        if fact.metric is not None:
            assert fact.metric in METRICS or fact.metric in CUSTOM
        if fact.event_type is not None:
            assert fact.metric == metric_of(fact.event_type)
            model = PROPERTIES[fact.event_type].model_validate(dict(fact.properties))
            # nothing slipped past the declared names but what has no place there
            assert set(model.model_extra or {}) <= {"subscriptionId", "hidden", "score"}
        assert fact.value is None or isinstance(fact.value, Decimal)


@pytest.mark.parametrize("name", [n for n in found() if n.startswith("shopify/") and "order" in n])
def test_test_orders_of_shopify_do_not_count_on_a_live_channel(name):
    body = json.loads(read(name)[2])
    if body.get("test") is True:
        assert outcome(name, test_channel=False).reason == "test_delivery"


@pytest.mark.parametrize("name", [n for n in found() if n.startswith("stripe/")])
def test_test_mode_of_stripe_does_not_count_on_a_live_channel(name):
    assert outcome(name, test_channel=False).reason == "test_mode_event"


@pytest.mark.parametrize("name", [n for n in found() if n.startswith("hotmart/")])
def test_sandbox_of_hotmart_does_not_count_on_a_live_channel(name):
    product = json.loads(read(name)[2])["data"]["product"]["id"]
    assert (outcome(name, test_channel=False).reason == "test_delivery") == (product == 0)


# The messages of a linked phone: name, who, in the form for matching and as received, and when.
LINKED = {
    "waha/message_text": (
        "false_5511900010001@c.us_60C5590F72EEF292F9545AFC28BF63CA", "+5511900010001", "5511900010001", 1_741_249_700),
    "waha/message_image": (
        "false_5562980030003@c.us_06F8FAEA3B5F697691B6D063A07BA4FF", "+5562980030003", "556280030003", 1_741_249_710),
    "waha/message_reply": (
        "false_5511900010001@c.us_55EAE50B75E2B2990F2C18BE84CA0797", "+5511900010001", "5511900010001", 1_741_249_720),
    # the target of the edit, named by a bare id
    "waha/message_edited": (
        "false_5511900010001@c.us_60C5590F72EEF292F9545AFC28BF63CA", "+5511900010001", "5511900010001", 1_741_249_750),
    "waha/message_reaction": (
        "true_762036E1EF0CEA7232ACD90A28BDE917", "+5511900010001", "5511900010001", 1_710_481_111.853),
    "waha/message_ack_read": (
        "true_762036E1EF0CEA7232ACD90A28BDE917", "+5511900010001", "5511900010001", 1_741_249_702.485),
    "evolution/messages_upsert_conversation": (
        "false_5511900010001@c.us_70167D0DBE48F1C6C01A69", "+5511900010001", "5511900010001", 1_746_132_673),
    "evolution/messages_upsert_conversation_from_me": (
        "true_8B6F47BB922A2C64D3E41E", "+5511900010001", "5511900010001", 1_746_133_821),
    "evolution/messages_upsert_lid_with_alt": (
        "false_5562980030003@c.us_ACF74C317ABADED4BE7EDC7E41BE13EE", "+5562980030003", "556280030003", 1_785_100_386),
    "evolution/messages_upsert_sticker": (
        "false_5562980030003@c.us_F2F42234BE1301258756", "+5562980030003", "556280030003", 1_705_684_409),
    # with the suffix of a device, and without a time of its own
    "evolution/messages_update_read": (
        "true_3EB0E62EC94C6C01256AE4", "+5511900010001", "5511900010001", RECEIVED.timestamp()),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in found() if n in LINKED])
def test_message_of_a_linked_phone_has_its_name_its_person_and_its_time(name):
    (fact,) = outcome(name).facts
    phone = fact.person.identities[-1]
    assert (fact.wamid, phone.value, phone.as_received, fact.occurred_at.timestamp()) == LINKED[name]
    assert all(identity.kind == "external" for identity in fact.person.identities[:-1])


# Who the samples are about, in the form for matching.
PEOPLE = {
    "hotmart/PURCHASE_APPROVED": ["ana.prado@example.com", "39053344705", "+5511900010001"],
    # the ninth digit was missing
    "hotmart/PURCHASE_EXPIRED": ["carla.nogueira@example.com", "98765432100", "+5562980030003"],
    "hotmart/PURCHASE_OUT_OF_SHOPPING_CART": ["bruno.teixeira@example.com", "+5521900020002"],
    # the parts of its phone are empty texts
    "hotmart/SUBSCRIPTION_CANCELLATION": ["ana.prado@example.com"],
    "typeform/form_response_br_phone_cpf_utm": ["ana.prado@example.com", "39053344705", "+5511900010001"],
    "typeform/form_response_file_upload_and_other_choice": ["carla.nogueira@example.com"],
    "typeform/form_response_official_with_hidden_and_variables": ["elis.hart@example.com"],
}


@pytest.mark.parametrize("name", [n for n in found() if n in PEOPLE])
def test_sample_names_its_person(name):
    assert [identity.value for identity in outcome(name).person.identities] == PEOPLE[name]


@pytest.mark.parametrize("name", [n for n in found() if "/orders_" in n and "with_headers" not in n])
def test_order_names_its_buyer_with_the_ninth_digit(name):
    assert [identity.value for identity in outcome(name).person.identities] == CARLA
