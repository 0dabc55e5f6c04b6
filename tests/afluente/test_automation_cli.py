"""`afluente automation`: written, tried, switched and looked at from the command line, run in this process."""

import asyncio
import io
import json

import pytest

from afluente import cli
from afluente.secrets import Keyring
from tests.consumers.automations.playing import Play
from tests.fixtures.postgres import clone

DEFINITION = {
    "name": "Obrigado pela compra",
    "trigger": {"type": "order_paid"},
    "conditions": {
        "all": [
            {"field": "event.value", "op": "gte", "value": 100},
            {"not": {"field": "contact.tags", "op": "contains", "value": "vip"}},
        ]
    },
    "steps": [
        {"type": "add_tag", "tag": "vip"},
        {"type": "send_message", "body": "Oi {{ contact.first_name }}! {{ link: https://loja.example/vip }}"},
        {"type": "wait", "for": "2d"},
        {"type": "call_webhook", "url": "https://erp.example/vip", "headers": {"Authorization": {"secret": "erp"}}},
    ],
}


@pytest.fixture(scope="module")
def database(postgres, template):
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def play(database):
    return Play(database)


@pytest.fixture
def run(database, monkeypatch, capsys):
    """Run a command; (exit status, its JSON or text, stderr)."""
    # a command sets the logging of its process up, and this process is the tests' own
    monkeypatch.setattr("afluente.telemetry.configure", lambda *_: None)
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("AFLUENTE_SECRETS_KEY", Keyring.generate("test"))

    def run(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["automation", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        if "json" in arguments and out:
            out = json.loads(out)
        return ended.value.code, out, err

    return run


def test_the_life_of_an_automation(play, run):
    org = str(play.organization)
    status, made, err = run("create", "-", "--org", org, "--format", "json", stdin=json.dumps(DEFINITION))
    assert (status, made["version"], made["unset_secrets"]) == (0, 1, ["erp"])
    assert made["signing_secret"].startswith("whsec_")
    assert f"afluente automation secret {made['id']} erp" in err
    assert run("secret", made["id"], "erp", stdin="Bearer s3cret\n")[0] == 0
    sealed = play.rows("SELECT name FROM automation_secrets ORDER BY 1")
    assert sealed == [("erp",), ("signing",)]

    # tried, before it is switched on, by the event's id or by the fact's: whole, and nothing is kept
    play.channel()
    contact = play.contact()
    play.record(contact, value="250.00", fact="order_paid:1")
    [event] = play.events("contact_event.recorded")
    before = play.scalar("SELECT count(*) FROM event_log"), play.scalar("SELECT count(*) FROM automations")
    status, tried, _ = run("test", made["id"], "--event", event.id, "--format", "json")
    assert status == 0
    fact = event.payload["contact_event_id"]
    by_fact = run("test", made["id"], "--event", fact, "--format", "json")[1]
    assert {**by_fact, "steps": []} == {**tried, "steps": []}
    assert [step["state"] for step in by_fact["steps"]] == [step["state"] for step in tried["steps"]]
    assert (tried["triggered"], tried["holds"], tried["state"], tried["contact_id"]) == (
        True,
        True,
        "done",
        str(contact),
    )
    assert [(part["condition"], part["holds"]) for part in tried["conditions"]["parts"]] == [
        ("event.value gte 100", True),
        ("not", True),
    ]
    assert [(step["state"], step["reason"]) for step in tried["steps"]] == [
        ("done", None), ("done", None), ("done", "would_wait"), ("done", "would_call"),
    ]  # fmt: skip
    assert tried["steps"][1]["details"]["body"].startswith("Oi Ana! https://links.example/l/")
    assert "contact_event.recorded: Tag Added" in tried["emits"]
    assert "message.queued" in tried["emits"]
    assert "system.automation_call_requested" not in tried["emits"]
    assert (play.scalar("SELECT count(*) FROM event_log"), play.scalar("SELECT count(*) FROM automations")) == before
    assert play.tags(contact) == []

    status, text, _ = run("test", made["id"], "--payload", "-", "--contact", contact, stdin='{"value": "99"}')
    assert status == 3
    assert 'no  event.value gte 100   found: ["99"]' in text
    hostile = json.dumps({"value": "9\x9b2J"}, ensure_ascii=False)
    text = run("test", made["id"], "--payload", "-", "--contact", contact, stdin=hostile)[1]
    assert 'found: ["9\\x9b2J"]' in text

    # switched on, it runs; what waits is seen, and cancelled by switching it off
    assert run("enable", made["id"])[0] == 0
    assert run("enable", made["id"])[0] == 3
    asyncio.run(play.work())
    play.record(contact, value="300", fact="order_paid:2")
    asyncio.run(play.work())
    status, [waiting], _ = run("runs", "--org", org, "--state", "waiting", "--format", "json")
    assert (status, waiting["automation"], waiting["position"]) == (0, DEFINITION["name"], 2)
    assert [step["state"] for step in waiting["steps"]] == ["done", "done", "waiting"]
    status, [row], _ = run("list", "--org", org, "--format", "json")
    assert (row["status"], row["open_runs"], row["bad_runs"]) == ("enabled", 1, 0)
    status, out, err = run("disable", DEFINITION["name"], "--org", org, "--format", "json")
    assert (status, out["runs"], "1 runs were cancelled" in err) == (0, 1, True)
    assert "cancelled" in run("runs", "--run", waiting["id"])[1]

    # edited: what `show` gives is what `edit` takes
    shown = run("show", made["id"], "--format", "json")[1]
    assert shown["definition"] == DEFINITION
    status, edited, _ = run("edit", made["id"], "-", "--format", "json", stdin=json.dumps(shown["definition"]))
    assert (edited["version"], edited["signing_secret"], edited["unset_secrets"]) == (2, None, [])


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "says"),
    [
        (("create", "-", "--org", "ORG"), "{", 1, "stdin is not JSON"),
        (("create", "-", "--org", "ORG"), "{}", 1, "name: is missing; trigger: is missing; steps: is missing"),
        (
            ("create", "-", "--org", "ORG"),
            json.dumps(DEFINITION | {"steps": [{"type": "wait", "for": "soon"}, {"type": "dance"}]}),
            1,
            "steps[0].for: 'soon' is no span such as 30m",
        ),
        (
            ("create", "-", "--org", "ORG"),
            json.dumps(DEFINITION | {"steps": [{"type": "call_webhook", "url": "http://169.254.169.254/latest"}]}),
            1,
            "steps[0].url: would never be called: the address is not public (link-local)",
        ),
        (
            ("create", "-", "--org", "ORG"),
            json.dumps(
                DEFINITION
                | {
                    "conditions": {"all": [{"not": {"field": "event.valu", "op": "gte", "value": 1}}]},
                    "steps": [{"type": "send_message", "body": "{{ contact.nam }} {{ event.properties.any | x }}"}],
                }
            ),
            1,
            "conditions: there is no field 'event.valu' here: event.value;"
            " steps[0].body: there is no field 'contact.nam' here: contact.name\n",
        ),
        (
            ("create", "-", "--org", "ORG"),
            json.dumps(
                DEFINITION
                | {
                    "trigger": {"type": "webhook", "source": "shopify"},
                    "steps": [{"type": "add_tag", "tag": "t", "when": {"field": "webhok.body.x", "op": "exists"}}],
                }
            ),
            1,
            "steps[0].when: there is no field 'webhok.body.x' here: webhook.body\n",
        ),
        (("create", "nowhere.json", "--org", "ORG"), "", 1, "cannot read nowhere.json"),
        (("show", "nobody"), "", 3, "there is no automation 'nobody'"),
        (("test", "nobody", "--payload", "-"), "{}", 3, "there is no automation"),
        (("test", "nobody"), "", 2, "--event or --payload"),
        (("runs", "--state", "failing"), "", 2, "'failed'"),
        (("list", "--org", "ORG"), "", 3, ""),
    ],
)
def test_what_cannot_be_done_is_said_with_the_place(play, run, arguments, stdin, status, says):
    given = [str(play.organization) if argument == "ORG" else argument for argument in arguments]
    code, _, err = run(*given, stdin=stdin)
    assert (code, says in err) == (status, True), err
