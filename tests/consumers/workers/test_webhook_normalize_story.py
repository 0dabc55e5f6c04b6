"""The demo's story through the receiver's store and both workers: every payload of ours ends where its note says."""

from collections import Counter
from datetime import UTC, datetime
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from afluente import postgres
from afluente.local import senders
from afluente.local.services.nuvemshop import Nuvemshop
from consumers.workers.webhook_fetch import WebhookFetchWorker
from consumers.workers.webhook_normalize import WebhookNormalizeWorker
from producers.ingest import store
from producers.ingest.sources import registered
from tests.consumers.workers.normalizing import Inbound
from tests.consumers.workers.test_webhook_fetch import Fetching

ACCOUNTS = (
    ("shopify", "Loja Azul", "loja-azul.myshopify.com"),
    ("nuvemshop", "Loja Azul", "4410002"),
    ("whatsapp", "Loja Azul", "106540352249001"),
    ("stripe", "Casa Verde", "acct_1CasaVerdeDemo"),
    ("shopify", "Casa Verde", "casa-verde.myshopify.com"),
    ("whatsapp", "Casa Verde", "106540352249002"),
)


@pytest.fixture
async def told(database):
    """The story, stored and handled; gives the Inbound to look at and the answers by post."""
    organizations = {name: database.organization(name) for name in ("Loja Azul", "Casa Verde")}
    inbound = Inbound(database, WebhookNormalizeWorker())
    channels = []
    for source, organization, account in ACCOUNTS:
        secrets = {"signature": f"secret-{source}".encode()}
        if source == "nuvemshop":
            secrets["api_token"] = senders.NUVEMSHOP_TOKEN.encode()
        channel = inbound.channel(source, organizations[organization], external_id=account, secrets=secrets)
        channels.append(senders.Channel(source, f"http://x/{channel}", f"secret-{source}", organization, account))
    answers = []
    for post in senders.story(channels):
        async with await postgres.connect_async(database.url) as conn:
            receipt = await store.receive(conn, inbound.keyring, incoming(post))
        answers.append((post, receipt))
    async with Nuvemshop() as api:
        given = senders.resources(channels)
        api.tokens |= given["tokens"]
        api.resources |= given["resources"]
        fetching = Fetching(database, WebhookFetchWorker(inbound.keyring, api.url))
        await fetching.worker.open()
        await inbound.work()
        await fetching.work()
        await fetching.worker.close()
    return inbound, answers


def incoming(post):
    return store.Incoming(
        source=registered()[post.channel.source],
        channel_id=UUID(urlsplit(post.channel.url).path.strip("/")),
        body=post.body,
        headers={name.lower(): value for name, value in post.headers.items()},
        received_at=datetime.now(UTC),
    )


async def test_story_is_what_the_demo_promises(told):
    inbound, answers = told
    assert len(answers) >= 40
    assert {post.channel.source for post, _ in answers} == {"shopify", "stripe", "nuvemshop", "whatsapp"}
    assert len({post.channel.organization for post, _ in answers}) == 2
    outcomes = Counter(receipt.outcome.value for _, receipt in answers)
    assert (outcomes["duplicate"], outcomes["refused"]) == (1, 1)
    for post, receipt in answers:
        assert (receipt.outcome.value == "refused") is (post.expect_status == 401)
    unknown = inbound.rows("SELECT reason FROM webhook_events WHERE parent_id IS NOT NULL AND status = 'unrecognised'")
    assert [row["reason"] for row in unknown] == ["unknown_shape:currency"]
    left = inbound.rows("SELECT topic FROM webhook_events WHERE parent_id IS NOT NULL AND status = 'received'")
    assert left == []


async def test_story_counts_each_purchase_once(told, database):
    rows = database.execute(
        "SELECT o.name, e.source, e.external_event_id, e.value::text FROM contact_events e"
        " JOIN organizations o ON o.id = e.organization_id WHERE e.event_type = 'purchase_completed' ORDER BY 1, 2, 3"
    )
    assert rows == [
        ("Casa Verde", "shopify", "order_paid:5550001", "119.20"),
        ("Casa Verde", "shopify", "order_paid:5550002", "119.20"),
        ("Casa Verde", "stripe", "order_paid:in_AFL0001", "59.90"),
        ("Casa Verde", "stripe", "order_paid:pi_AFL0001", "149.00"),
        ("Casa Verde", "stripe", "order_paid:pi_AFL0002", "149.00"),
        ("Loja Azul", "nuvemshop", "order_paid:771001", "87.00"),
        ("Loja Azul", "shopify", "order_paid:5550001", "119.20"),
        ("Loja Azul", "shopify", "order_paid:5550002", "119.20"),
    ]


async def test_story_leaves_no_fact_without_its_person(told, database):
    inbound, _ = told
    without = inbound.rows("SELECT topic, summary FROM webhook_events WHERE summary ? 'without_contact'")
    assert without == []
    assert database.execute("SELECT count(*) FROM alerts") == [(0,)]
    # the person of the shop is the one who writes: by the phone number
    ((names,),) = database.execute(
        "SELECT array_agg(c.name ORDER BY c.name) FROM contacts c JOIN organizations o ON o.id = c.organization_id"
        " WHERE o.name = 'Loja Azul'"
    )
    assert names == ["Helena Duarte", "Igor Salles", "Karina Lopes", "Lucas Prates", "Marina Sá"]
