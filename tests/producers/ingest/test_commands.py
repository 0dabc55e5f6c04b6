"""`afluente channel` and `afluente webhook list|replay`, as a person runs them."""

import json

import pytest

from afluente.secrets import Keyring
from producers.ingest import store
from producers.ingest.sources import registered
from tests.producers.ingest.conftest import shopify

ADD = ("channel", "add", "shopify", "--org", "Loja Azul", "--create-org", "--external-id", "Loja-Azul.myshopify.com")


@pytest.fixture
def run(processes):
    """Run a command; gives its exit status and its JSON, or the text it said."""
    key = Keyring.generate()

    def run(*arguments, env=None):
        arguments = (*arguments, "--format", "json")
        done = processes.run(*arguments, env={"AFLUENTE_SECRETS_KEY": key} | (env or {}))
        try:
            return done.returncode, json.loads(done.stdout)
        except ValueError:
            return done.returncode, done.stderr

    run.key = key  # type: ignore[attr-defined]
    return run


def test_channel_is_added_listed_and_its_secret_rotated(run):
    status, added = run(*ADD, "--base-url", "https://hooks.example/")
    assert status == 0
    assert added["url"] == f"https://hooks.example/webhooks/shopify/{added['id']}"
    assert added["secret"].startswith("whsec_")
    status, (listed,) = run("channel", "list", "--org", "Loja Azul")
    assert (listed["external_id"], listed["valid_secrets"], listed["mode"]) == ("loja-azul.myshopify.com", 1, "live")
    assert "secret" not in json.dumps(listed).replace("valid_secrets", "")
    status, rotated = run("channel", "rotate", added["id"], "--secret", "given")
    assert status == 0
    assert "secret" not in rotated
    assert run("channel", "list")[1][0]["valid_secrets"] == 2


def test_channel_that_is_there_already_and_senders_nobody_knows_are_refused(run):
    assert run(*ADD)[0] == 0
    status, said = run(*ADD)
    assert status == 1
    assert "is connected already" in said
    status, said = run("channel", "add", "nobody", "--org", "Loja Azul")
    assert status == 1
    assert "shopify" in said
    status, said = run("channel", "add", "shopify", "--org", "Nobody's")
    assert status == 3
    assert "--create-org" in said


@pytest.mark.parametrize("command", [ADD, ("webhook", "replay", "00000000-0000-4000-8000-000000000000")])
def test_missing_key_is_named(run, command):
    status, said = run(*command, env={"AFLUENTE_SECRETS_KEY": ""})
    assert status == 2
    assert "AFLUENTE_SECRETS_KEY" in said


async def test_delivery_is_listed_and_replayed(run, database, clock):
    _, added = run(*ADD)
    body = b'{"id": 1}'
    headers = shopify(body, added["secret"].encode(), **{"X-Shopify-Topic": "orders/create", "X-Shopify-Event-Id": "1"})
    async with await database.connect_async() as conn:
        await store.receive(
            conn,
            Keyring.parse(run.key),
            store.Incoming(
                source=registered()["shopify"],
                channel_id=added["id"],
                body=body,
                headers={name.lower(): value for name, value in headers.items()},
                received_at=clock.now(),
            ),
        )
    status, (listed,) = run("webhook", "list", "--source", "shopify", "--since", "2026-11-29T11:00:00")
    assert (status, listed["status"], listed["topic"]) == (0, "received", "orders/create")
    assert run("webhook", "list", "--status", "refused") == (0, [])
    assert run("webhook", "replay", listed["id"]) == (0, [{"id": listed["id"], "events": 1, "problem": None}])
    # its POST: every part has been through
    assert run("webhook", "replay", listed["parent_id"])[0] == 3
    status, rows = run("webhook", "replay", listed["id"], added["id"])
    assert status == 5
    assert "no delivery" in rows[1]["problem"]
