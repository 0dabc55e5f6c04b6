"""Settings: one error lists every wrong variable, with its name and value, and never a secret."""

import ipaddress

import pytest

from afluente.errors import SettingsError
from afluente.settings import (
    KafkaSettings,
    LogSettings,
    MigrateSettings,
    OutboundSettings,
    PostgresSettings,
    RelaySettings,
    WorkerSettings,
)

GOOD = {"KAFKA_BOOTSTRAP_SERVERS": "a:9092,b:9092", "DATABASE_URL": "postgresql://u:p@h/db"}


def test_a_process_reads_what_is_set_and_has_defaults_for_the_rest():
    settings = WorkerSettings.read(GOOD | {"LOG_FORMAT": "JSON", "AFLUENTE_BACKOFF_SCALE": "0.01"})
    assert settings.kafka.client_config() == {"bootstrap.servers": "a:9092,b:9092", "security.protocol": "PLAINTEXT"}
    assert settings.postgres.dsn == "postgresql://u:p@h/db"
    assert settings.log.format == "json"
    assert settings.log.level == "info"
    assert settings.backoff.scale == 0.01


def test_every_problem_is_named_at_once_with_variable_and_value():
    with pytest.raises(SettingsError) as error:
        WorkerSettings.read({"LOG_LEVEL": "loud", "AFLUENTE_ENVIRONMENT": "moon", "KAFKA_BOOTSTRAP_SERVERS": "nohost"})
    problems = {variable: (value, what) for variable, value, what in error.value.problems}
    assert set(problems) == {"LOG_LEVEL", "AFLUENTE_ENVIRONMENT", "KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL"}
    assert problems["LOG_LEVEL"][0] == "loud"
    assert problems["KAFKA_BOOTSTRAP_SERVERS"] == ("nohost", "'nohost' is not host:port")
    assert problems["DATABASE_URL"] == (None, "is required and not set")
    assert "AFLUENTE_ENVIRONMENT='moon'" in str(error.value)


def test_a_secret_is_not_in_the_message():
    with pytest.raises(SettingsError) as error:
        MigrateSettings.read({"DATABASE_URL": "not a url geheim"})
    assert "geheim" not in str(error.value)
    assert "DATABASE_URL" in str(error.value)
    assert "geheim" not in repr(PostgresSettings.read({"DATABASE_URL": "postgresql://u:geheim@h/db"}))


@pytest.mark.parametrize("server", ["host", "host:", ":9092", "host:0", "host:70000", "host:kafka", "a:1,,b:2"])
def test_servers_that_are_not_host_and_port_are_refused(server):
    with pytest.raises(SettingsError, match="KAFKA_BOOTSTRAP_SERVERS"):
        KafkaSettings.read({"KAFKA_BOOTSTRAP_SERVERS": server})


def test_an_empty_variable_counts_as_not_set():
    assert LogSettings.read({"LOG_LEVEL": "", "LOG_FORMAT": ""}).level == "info"
    with pytest.raises(SettingsError, match="required"):
        MigrateSettings.read({"DATABASE_URL": ""})


def test_a_value_may_come_from_a_file(tmp_path):
    secret = tmp_path / "url"
    secret.write_text("postgresql://from@file/db\n")
    assert MigrateSettings.read({"DATABASE_URL_FILE": str(secret)}).postgres.dsn == "postgresql://from@file/db"


def test_a_file_that_is_not_there_and_a_value_given_twice_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"DATABASE_URL_FILE=.*cannot be read"):
        MigrateSettings.read({"DATABASE_URL_FILE": str(tmp_path / "missing")})
    with pytest.raises(SettingsError, match="keep one of them"):
        MigrateSettings.read({"DATABASE_URL": "postgresql://h/db", "DATABASE_URL_FILE": str(tmp_path)})


def test_networks_are_a_list_separated_by_commas():
    settings = OutboundSettings.read({"AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8, ::1/128"})
    assert settings.allow_networks == (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
    with pytest.raises(SettingsError, match=r"'10\.0\.0\.1/8' is not a network"):
        OutboundSettings.read({"AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "10.0.0.1/8"})


def test_the_prefix_is_put_before_group_ids_and_must_fit_a_topic_name():
    settings = KafkaSettings(bootstrap_servers="h:1", topic_prefix="loja.")
    assert settings.group_id("audit-worker") == "loja.audit-worker"
    with pytest.raises(SettingsError, match="AFLUENTE_TOPIC_PREFIX='a b'"):
        RelaySettings.read(GOOD | {"AFLUENTE_TOPIC_PREFIX": "a b"})


def test_sasl_and_tls_reach_the_client(tmp_path):
    (tmp_path / "ca.pem").touch()
    config = KafkaSettings.read(
        {
            "KAFKA_BOOTSTRAP_SERVERS": "h:1",
            "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA_SASL_USERNAME": "u",
            "KAFKA_SASL_PASSWORD": "p",
            "KAFKA_SSL_CA_LOCATION": str(tmp_path / "ca.pem"),
        }
    ).client_config()
    assert config["security.protocol"] == "SASL_SSL"
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    assert config["sasl.password"] == "p"
    assert config["ssl.ca.location"] == str(tmp_path / "ca.pem")


def test_every_variable_has_a_meaning():
    for variable, field in WorkerSettings.variables().items():
        assert field.description, variable


@pytest.mark.parametrize(
    ("settings", "variable", "value"),
    [
        (WorkerSettings, "AFLUENTE_SECRETS_KEY", "garbage"),
        (WorkerSettings, "AFLUENTE_SECRETS_KEY", "k1:AAAA"),
        (WorkerSettings, "SCHEMA_REGISTRY_URL", "garbage"),
        (WorkerSettings, "AFLUENTE_NUVEMSHOP_URL", "http://"),
        (WorkerSettings, "AFLUENTE_NUVEMSHOP_URL", "http://h:port"),
        (WorkerSettings, "AFLUENTE_CLAIM_TAKEOVER_S", "inf"),
        (WorkerSettings, "AFLUENTE_CLAIM_RENEW_S", "inf"),
        (WorkerSettings, "AFLUENTE_CLAIM_RENEW_S", "200"),
        (WorkerSettings, "AFLUENTE_BACKOFF_SCALE", "nan"),
        (WorkerSettings, "DATABASE_URL", "postgresql://u:p@h:notaport/x"),
        (KafkaSettings, "KAFKA_SSL_CA_LOCATION", "/nowhere/ca.pem"),
        (KafkaSettings, "KAFKA_SASL_MECHANISM", "FOO"),
        (KafkaSettings, "KAFKA_SASL_MECHANISM", "PLAIN"),
        (KafkaSettings, "KAFKA_SASL_USERNAME", "alone"),
        (KafkaSettings, "AFLUENTE_TOPIC_PREFIX", ".."),
        (LogSettings, "AFLUENTE_HEARTBEAT_FILE", "/nowhere/beat"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_starts(settings, variable, value):
    with pytest.raises(SettingsError) as error:
        settings.read(GOOD | {variable: value})
    assert [problem[0] for problem in error.value.problems] == [variable]


def test_a_variable_and_its_file_are_one_problem(tmp_path):
    (tmp_path / "url").write_text("postgresql://u:p@h/db")
    with pytest.raises(SettingsError) as error:
        MigrateSettings.read(GOOD | {"DATABASE_URL_FILE": str(tmp_path / "url")})
    assert [what for _, _, what in error.value.problems] == ["is set, and so is DATABASE_URL_FILE: keep one of them"]
