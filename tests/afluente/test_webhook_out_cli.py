"""The outgoing half of `afluente webhook`, as commands."""

import hashlib
import hmac
import json
from uuid import uuid4

import pytest

from afluente.secrets import Keyring
from consumers.outbound import signature


class Webhook:
    """`afluente webhook ...` with a key ring of its own."""

    def __init__(self, processes, organization):
        self.processes = processes
        self.organization = organization
        self.env = {"AFLUENTE_SECRETS_KEY": Keyring.generate("test")}

    def __call__(self, *arguments, **env):
        return self.processes.run("webhook", *arguments, env=self.env | env)


@pytest.fixture
def webhook(processes, database):
    return Webhook(processes, database.organization())


def test_a_subscription_from_the_first_secret_to_the_last(webhook, database):
    made = webhook(
        *("subscribe", "https://example.com/hook", "--org", webhook.organization, "--type", "lead.created"),
        *("--format", "json"),
    )
    assert made.returncode == 0, made.stderr
    subscription = json.loads(made.stdout)
    assert subscription["secret"].startswith("whsec_")
    assert subscription["event_types"] == ["lead.created"]

    listed = webhook("subscriptions", "--format", "json")
    (row,) = json.loads(listed.stdout)
    assert (row["id"], row["url"], row["enabled"]) == (subscription["id"], "https://example.com/hook", True)
    assert "whsec_" not in listed.stdout

    rotated = webhook("rotate-secret", subscription["id"], "--format", "json")
    assert json.loads(rotated.stdout)["secret"] != subscription["secret"]
    assert database.execute("SELECT count(*), count(valid_until) FROM webhook_subscription_secrets") == [(2, 1)]

    assert webhook("enable", subscription["id"]).returncode == 3
    database.execute("UPDATE webhook_subscriptions SET enabled = false, disabled_at = now(), disabled_reason = 'ten'")
    assert "webhook enable" in webhook("subscriptions").stderr
    enabled = webhook("enable", subscription["id"])
    assert enabled.returncode == 0
    assert "recover" in enabled.stderr
    assert webhook("recover", subscription["id"], "--since", "1h", "--yes").returncode == 3


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "http://169.254.169.254/latest", "ftp://example.com", "https://kafka/", "not a url"]
)
def test_a_url_that_would_never_be_called_is_refused_when_it_is_given(webhook, database, url):
    refused = webhook("subscribe", url, "--org", webhook.organization)
    assert refused.returncode == 2
    assert "would never be called" in refused.stderr
    assert database.execute("SELECT count(*) FROM webhook_subscriptions") == [(0,)]


@pytest.mark.parametrize(
    ("url", "network"),
    [("http://127.0.0.1:9911/hook", "127.0.0.0/8"), ("http://localhost:9911/", "127.0.0.0/8"),
     ("http://10.1.2.3/", "10.1.2.3/32"), ("http://169.254.169.254/latest", None)],
)  # fmt: skip
def test_a_receiver_nearby_is_refused_with_the_way_out(webhook, url, network):
    subscribe = ("subscribe", url, "--org", webhook.organization)
    refused = webhook(*subscribe)
    assert refused.returncode == 2
    if network is None:
        assert "try:" not in refused.stderr
        return
    assert f"AFLUENTE_WEBHOOK_ALLOW_NETWORKS={network}" in refused.stderr
    assert "webhook-dispatch-worker" in refused.stderr
    assert webhook(*subscribe, AFLUENTE_WEBHOOK_ALLOW_NETWORKS=network).returncode == 0
    assert "try:" not in webhook(*subscribe, AFLUENTE_ENVIRONMENT="production").stderr


def test_the_organization_is_found_by_its_name_too(webhook, database):
    organization = database.organization("Loja Azul")
    url = "https://example.com/hook"
    assert webhook("subscribe", url, "--org", "Loja Azul").returncode == 0
    assert database.execute("SELECT organization_id FROM webhook_subscriptions") == [(organization,)]
    (row,) = json.loads(webhook("subscriptions", "--org", "Loja Azul", "--format", "json").stdout)
    assert row["organization_id"] == str(organization)
    assert webhook("list", "--org", "Loja Azul").returncode == 0
    for command in (("subscribe", url), ("subscriptions",), ("list",)):
        unknown = webhook(*command, "--org", "Nobody")
        assert (unknown.returncode, "no organization is called 'Nobody'" in unknown.stderr) == (3, True)
        assert "--create-org" not in unknown.stderr


def test_help_says_how_a_delivery_is_verified_and_that_is_how_it_is_signed(webhook):
    shown = webhook("subscribe", "--help").stdout
    example = [line.strip() for line in shown.split("In Python, with the second one:")[1].splitlines()][1:4]
    assert "Standard Webhooks" in shown
    secret, body = signature.new_secret(), b'{"a": 1}'
    headers = signature.headers(
        [secret], delivery_id="d-1", event_type="lead.created", attempt=1, timestamp=1_700_000_000, body=body
    )
    t, v1 = (part.split("=", 1)[1] for part in headers["X-Webhook-Signature"].split(","))
    names = {"hmac": hmac, "hashlib": hashlib, "headers": headers, "secret": secret, "body": body, "t": t, "v1": v1}
    exec("\n".join(example[:2]), names)
    assert eval(example[2], names)


def test_plain_http_is_refused_in_production(webhook):
    refused = webhook(
        "subscribe", "http://example.com/", "--org", webhook.organization, AFLUENTE_ENVIRONMENT="production"
    )
    assert refused.returncode == 2
    assert "https" in refused.stderr


def test_mistakes_are_told_in_a_sentence(webhook):
    url = "https://example.com/"
    for arguments in (
        ("subscribe", url, "--org", webhook.organization, "--type", "webhook.received"),
        ("subscribe", url, "--org", webhook.organization, "--type", "Lead"),
        ("subscribe", url, "--org", uuid4()),
        ("enable", uuid4()),
        ("rotate-secret", uuid4()),
        ("recover", uuid4(), "--since", "1h"),
    ):
        failed = webhook(*arguments)
        assert failed.returncode == 1, failed.stderr
        assert failed.stderr.startswith("afluente: ")
        assert "Traceback" not in failed.stderr
    assert webhook("subscriptions").returncode == 3
    assert webhook("subscribe", url, "--org", webhook.organization, AFLUENTE_SECRETS_KEY="").returncode == 2
