"""`afluente channel` and `afluente webhook list|replay`, as a person runs them."""

import json
import os

import pytest

from afluente import cli
from afluente.secrets import Keyring
from producers.ingest import mapping, store
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
    assert run("webhook", "list", "--status", "refusd")[0] == 2
    assert [row["sender"] for row in run("webhook", "list", "--channel", added["id"])[1]] == ["shopify"]
    assert run("webhook", "list", "--channel", listed["id"]) == (0, [])
    assert run("webhook", "replay", listed["id"]) == (0, [{"id": listed["id"], "events": 1, "problem": None}])
    # its POST: every part has been through
    assert run("webhook", "replay", listed["parent_id"])[0] == 3
    status, rows = run("webhook", "replay", listed["id"], added["id"])
    assert status == 5
    assert "no delivery" in rows[1]["problem"]


@pytest.fixture
def here(capsys, monkeypatch, database):
    """A command of `afluente channel` in this process, on the test's database: its exit status, what it said."""
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("AFLUENTE_SECRETS_KEY", Keyring.generate())

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["channel", *arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_generic_sender_is_added_by_a_mapping_which_can_be_changed_but_not_its_name(here, tmp_path):
    add = ("add", "generic", "--org", "Loja Azul", "--create-org", "--secret", "given", "--format", "json")
    status, out, _ = here(*add, "--mapping", "yampi")
    added = json.loads(out)
    assert (status, added["sender"], "secret" in added) == (0, "yampi", False)
    status, _, said = here(*add, "--mapping", "yampi")
    assert (status, "--as" in said) == (1, True)
    assert here(*add, "--mapping", "yampi", "--as", "yampi_outlet")[0] == 0
    status, _, said = here(*add)
    assert (status, "needs a mapping" in said) == (1, True)
    own = mapping.example("yampi")
    own["rules"][0]["facts"][0]["metric"] = "__webhook__"
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own))
    status, _, said = here("mapping", "set", added["id"], str(file))
    assert (status, "rules[0].facts[0].metric" in said) == (1, True)
    status, _, said = here("mapping", "set", added["id"], "courier")
    assert (status, "recorded under that name" in said) == (1, True)
    own["rules"] = [{"name": "all", "ignore": True}]
    file.write_text(json.dumps(own))
    assert here("mapping", "set", added["id"], str(file))[0] == 0
    assert json.loads(here("mapping", "show", added["id"])[1]) == own
    names = {row["external_id"] for row in json.loads(here("list", "--format", "json")[1])}
    assert names == {"yampi", "yampi_outlet"}


def test_secret_that_is_empty_or_not_ours_to_make_up_is_refused(here):
    """As by a variable that is not set: one would be made up that nobody is shown."""
    add = ("add", "hotmart", "--org", "Loja Azul", "--create-org", "--format", "json")
    status, _, said = here(*add, "--secret", "")
    assert (status, "is empty" in said) == (1, True)
    status, out, _ = here(*add)
    added = json.loads(out)["id"]
    assert status == 0
    status, _, said = here("rotate", added, "--secret", " ")
    assert (status, "is empty" in said) == (1, True)
    status, _, said = here("rotate", added, "--purpose", "api_token")
    assert (status, "--secret" in said) == (1, True)
    assert here("rotate", added, "--purpose", "password")[0] == 2
    assert json.loads(here("list", "--format", "json")[1])[0]["valid_secrets"] == 1


async def test_what_named_no_connection_is_taken_in_once_that_is_corrected(here, database, clock):
    add = ("add", "evolution", "--org", "Loja Azul", "--create-org", "--secret", "given", "--format", "json")
    added = json.loads(here(*add, "--external-id", "loja-azull")[1])
    assert here(*add, "--external-id", "loja-verde")[0] == 0

    async def come():
        async with await database.connect_async() as conn:
            return await store.receive(
                conn,
                Keyring.parse(os.environ["AFLUENTE_SECRETS_KEY"]),
                store.Incoming(
                    source=registered()["evolution"],
                    channel_id=added["id"],
                    body=b'{"event": "messages.upsert", "instance": "loja-azul"}',
                    headers={"x-webhook-secret": "given"},
                    received_at=clock.now(),
                ),
            )

    async def replayed(receipt):
        async with await database.connect_async() as conn:
            keyring = Keyring.parse(os.environ["AFLUENTE_SECRETS_KEY"])
            return await store.replay(conn, keyring, receipt.webhook_event_id, clock.now())

    lost = await come()
    assert lost.outcome == store.Outcome.UNROUTED
    assert await replayed(lost) == 0
    status, _, said = here("change", added["id"], "--external-id", "loja-verde")
    assert (status, "is connected already" in said) == (1, True)
    status, out, _ = here("change", added["id"], "--external-id", "loja-azul", "--status", "paused", "--format", "json")
    assert (status, json.loads(out)["external_id"], json.loads(out)["status"]) == (0, "loja-azul", "paused")
    assert await replayed(lost) == 0
    assert here("change", added["id"], "--status", "active")[0] == 0
    assert await replayed(lost) == 1
    assert here("change", added["id"])[0] == 2
    assert here("change", str(lost.webhook_event_id), "--name", "x")[0] == 1


def test_settings_of_a_sender_are_checked_when_it_is_added(here):
    add = ("add", "typeform", "--org", "Loja Azul", "--create-org", "--secret", "given")
    status, _, said = here(*add, "--field", "telephone=a1")
    assert (status, "fields.telephone" in said) == (1, True)
    assert here(*add, "--field", "phone=a1")[0] == 0


def test_mapping_is_tried_on_payloads_without_storing_anything(here, database, tmp_path):
    status, out, _ = here("mapping", "check", "courier", "--format", "json")
    assert status == 0
    outcomes = json.loads(out)
    assert [outcome["payload"] for outcome in outcomes] == list(mapping.samples("courier"))
    assert outcomes[-1]["facts"][0]["metric"] == "Shipment Delivered"
    assert outcomes[-1]["contact"]["phone"] == "+5581988887777"
    payload = tmp_path / "payload.json"
    payload.write_text('{"status": "teleported"}')
    status, out, _ = here("mapping", "check", "courier", str(payload))
    assert (status, "unrecognised" in out, "unknown_topic" in out) == (3, True, True)
    payload.write_text("not JSON")
    assert here("mapping", "check", "courier", str(payload), "--format", "json")[0] == 3
    assert database.execute("SELECT count(*) FROM webhook_events") == [(0,)]


def test_mapping_that_is_wrong_is_told_by_its_field(here, tmp_path):
    file = tmp_path / "own.json"
    status, out, _ = here("mapping", "show", "yampi")
    assert (status, json.loads(out)) == (0, mapping.example("yampi"))
    file.write_text(out.replace('"order_placed"', '"Order placed"'))
    status, _, said = here("mapping", "check", str(file))
    assert (status, "rules[0].facts[0].fact" in said) == (1, True)
    assert here("mapping", "check", str(tmp_path / "missing.json"))[0] == 1
    status, out, _ = here("mapping", "list", "--format", "json")
    assert [row["name"] for row in json.loads(out)] == ["courier", "yampi"]
    assert "rules[].facts[].metric" in here("mapping", "fields")[1]
