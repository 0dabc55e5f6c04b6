"""One webhook all the way, with the real commands: HTTP, event_log, Kafka, the worker, and the event it leads to."""

import json
import urllib.error
import urllib.request

import schemas
from afluente.secrets import Keyring
from tests.consumers.workers.test_webhook_normalize_shopify import REFUND, order, paid
from tests.producers.ingest.conftest import shopify


def post(url, body, headers):
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_shopify_order_goes_from_the_receiver_to_the_contact_event_topic(database, topics, processes):
    environment = {"AFLUENTE_SECRETS_KEY": Keyring.generate()}
    topics.create_worker("webhook-normalize-worker")
    web = processes.start("web", "run", "--only", "ingest", "--port", "0", env=environment)
    relay = processes.start("relay", "run")
    worker = processes.start("worker", "run", "webhook-normalize-worker", env=environment)
    address = web.wait_for("web.ready")["url"]
    relay.wait_for("relay.ready")
    worker.wait_for("worker.ready")

    added = processes.run(
        "channel", "add", "shopify", "--org", "Loja Azul", "--create-org", "--base-url", address, "--format", "json",
        env=environment,
    )  # fmt: skip
    assert added.returncode == 0, added.stderr
    channel = json.loads(added.stdout)
    body = json.dumps(paid()).encode()
    headers = shopify(body, channel["secret"].encode(), **{"X-Shopify-Topic": "orders/paid", "X-Shopify-Event-Id": "1"})
    assert [post(channel["url"], body, headers) for _ in range(2)] == [200, 200]
    assert post(channel["url"], body, headers | {"X-Shopify-Hmac-Sha256": "AAAA"}) == 401

    worker.wait_for("worker.delivered")
    relay.wait_for("relay.published", count=2)
    listed = json.loads(processes.run("webhook", "list", "--format", "json").stdout)
    assert sorted(row["status"] for row in listed) == ["duplicate", "processed", "refused"]
    relay.terminate()
    records = [schemas.decode(record.value()) for record in topics.records(topics.event("contact_event.recorded"))]
    purchases = [event for event in records if event.payload["contact_event_type"] == "purchase_completed"]
    assert [event.payload["value"] for event in purchases] == ["297.90"]
    assert str(purchases[0].organization_id) == channel["organization_id"]
    # what the receiver says never holds a person, a body or a secret
    for text in (channel["secret"], "Ana@Example.com", "80030003"):
        assert text not in web.log
    assert web.terminate() == 0
    assert worker.terminate() == 0


def test_refund_before_its_order_is_tried_again_until_the_order_is_there(database, topics, processes):
    environment = {"AFLUENTE_SECRETS_KEY": Keyring.generate(), "AFLUENTE_BACKOFF_SCALE": "0.01"}
    topics.create_worker("webhook-normalize-worker")
    web = processes.start("web", "run", "--only", "ingest", "--port", "0", env=environment)
    relay = processes.start("relay", "run")
    worker = processes.start("worker", "run", "webhook-normalize-worker", env=environment)
    address = web.wait_for("web.ready")["url"]
    relay.wait_for("relay.ready")
    worker.wait_for("worker.ready")
    added = processes.run(
        "channel", "add", "shopify", "--org", "Loja Azul", "--create-org", "--base-url", address, "--format", "json",
        env=environment,
    )  # fmt: skip
    channel = json.loads(added.stdout)

    def send(topic, value):
        body = json.dumps(value).encode()
        headers = shopify(body, channel["secret"].encode(), **{"X-Shopify-Topic": topic, "X-Shopify-Event-Id": topic})
        assert post(channel["url"], body, headers) == 200

    send("refunds/create", REFUND)
    worker.wait_for("worker.retried")
    send("orders/create", order())
    worker.wait_for("worker.delivered", count=2)
    rows = database.execute(
        "SELECT status, reason FROM webhook_events WHERE parent_id IS NOT NULL ORDER BY received_at"
    )
    assert rows == [("processed", "order_refunded"), ("processed", "order_placed")]
    facts = database.execute("SELECT metric_name FROM contact_events WHERE metric_name LIKE 'Order%%' ORDER BY 1")
    assert facts == [("Order Placed",), ("Order Refunded",)]
