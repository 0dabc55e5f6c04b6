"""The outgoing half of `afluente webhook`, as commands."""

import json
from uuid import uuid4

import pytest

from afluente.secrets import Keyring


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
