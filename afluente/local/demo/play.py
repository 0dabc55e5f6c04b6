"""The demo: the stack, every process as a process of its own, payloads of real senders' shapes, and what came of them.

Nothing here is a short cut: webhooks are posted signed over HTTP, every process is the real command, and the end is
`afluente verify`, whose exit status is the demo's. Only the waits between attempts are scaled down, and it says so.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql as pgsql
from psycopg.conninfo import make_conninfo

import producers
from afluente import kafka, postgres
from afluente.local import process, senders, stack
from afluente.local.demo import report
from afluente.local.demo.narrator import Narrator
from afluente.local.errors import LocalError
from afluente.local.processes import COMMAND, Process, stop_all
from afluente.secrets import Keyring
from afluente.settings import KafkaSettings
from consumers.automations import book
from consumers.outbound import subscriptions
from consumers.workers import REGISTRY
from producers import organizations as organizations_named
from producers.ingest import channels, mapping
from schemas.topics import Topics

BACKOFF_SCALE = 0.001  # 30 s become 30 ms: eight attempts in about 8 s instead of two hours
READY_WITHIN_S = 60.0
QUIET_WITHIN_S = 90.0
LOOK_EVERY_S = 0.2
PREFIX = "demo."
GUEST = "guest.json"

LOJA_AZUL, CASA_VERDE = ORGANIZATIONS = ("Loja Azul", "Casa Verde")
# (source, organization, what the sender calls the account). Loja Azul's number comes first: its POST holds both.
CHANNELS = (
    ("shopify", LOJA_AZUL, "loja-azul.myshopify.com"),
    ("nuvemshop", LOJA_AZUL, "4410002"),
    ("whatsapp", LOJA_AZUL, "106540352249001"),
    ("stripe", CASA_VERDE, "acct_1CasaVerdeDemo"),
    ("shopify", CASA_VERDE, "casa-verde.myshopify.com"),
    ("whatsapp", CASA_VERDE, "106540352249002"),
    ("hotmart", CASA_VERDE, "curso-de-cafe"),
    ("typeform", LOJA_AZUL, "cafeform"),
    ("waha", LOJA_AZUL, "loja-azul"),
    ("evolution", CASA_VERDE, "casa-verde"),
    ("generic", LOJA_AZUL, "courier"),  # a mapping that is shipped
)
# (name, organization, event types, how the receiver behaves)
SUBSCRIBERS: tuple[tuple[str, str, list[str], dict[str, Any]], ...] = (
    ("erp", LOJA_AZUL, ["*"], {}),
    ("helpdesk", CASA_VERDE, ["message.received", "conversation.opened"], {}),
    (
        "third-time-lucky",
        CASA_VERDE,
        ["lead.won"],
        {"orders": [{"do": "answer", "status": 503, "body": "starting"}, {"do": "cut"}]},
    ),
    ("never-works", LOJA_AZUL, ["lead.lost"], {"then": {"do": "answer", "status": 500, "body": "out of order"}}),
)

AUTOMATION: dict[str, Any] = {
    "name": "Obrigado pela compra",
    "trigger": {"type": "order_paid"},
    "conditions": {"field": "event.value", "op": "gte", "value": 80},
    "steps": [
        {"type": "add_tag", "tag": "cliente"},
        {"type": "send_message", "body": "Oi {{ contact.first_name | tudo bem }}! Obrigado pela compra."},
        {"type": "wait", "for": "1s"},
        {"type": "call_webhook", "url": "", "on_error": "continue"},
    ],
}


@dataclass(frozen=True)
class Options:
    """`folder`: data, logs and addresses of the demo. `keep`: leave everything running."""

    folder: Path
    keep: bool = False


def play(options: Options) -> int:
    """Play the story; returns the exit status of the reconciliation (0: everything adds up)."""
    began = time.monotonic()
    folder = options.folder.absolute()
    narrator = Narrator({})
    _start_afresh(folder)
    with ExitStack() as at_end:
        narrator.title("1. Kafka and Postgres")
        narrator.say("stack", "looking for servers, or starting them ...")
        servers = stack.up(folder, os.environ, say=lambda text: narrator.say("stack", text))
        if not options.keep:
            at_end.callback(stack.down, folder)
            at_end.callback(_leave, folder)
        run = f"{time.time_ns():x}"
        prefix = PREFIX if servers.kafka.source is stack.Source.embedded else f"{PREFIX}{run}."
        database = _database(folder, servers, prefix, f"afluente_demo_{run}")
        prepared = stack.Stack(folder, servers.kafka, database, servers.secrets_key)
        applied, topics = stack.prepare(prepared, topic_prefix=prefix)
        narrator.say("stack", f"Kafka at {servers.kafka.address} ({servers.kafka.source}), {topics} topics")
        narrator.say("stack", f"Postgres ({servers.postgres.source}), {len(applied)} migrations")

        environment = _environment(prepared, prefix)
        narrator.title("2. Each part a process of its own")
        cast = _Cast(folder, environment, narrator)
        with _stopped(cast, options.keep):
            scene = _set_up(cast, prepared, narrator)
            web = cast.start_all()
            settings = KafkaSettings(bootstrap_servers=servers.kafka.address, topic_prefix=prefix)
            status = _act(cast, scene, web, prepared, settings, narrator)
        seconds = time.monotonic() - began
        if options.keep:
            cast.note_tickets()
            _say_kept(folder, prepared, scene, web, environment, narrator)
        narrator.title(f"{'Everything adds up' if status == 0 else 'Something does not add up'} ({seconds:.0f} s).")
        return status


def stop(folder: Path) -> bool:
    """End what a kept demo left running; its data stays until the next one. False when there is none."""
    folder = folder.absolute()
    tickets = sorted((folder / "tickets").glob("*.json")) if folder.exists() else []
    for path in tickets:
        process.end(process.Ticket.load(path), signal.SIGTERM, 15)
        path.unlink()
    _leave(folder)
    return bool(stack.down(folder)) or bool(tickets)


@dataclass(frozen=True)
class _Scene:
    """Who is in the story."""

    organizations: dict[str, UUID]
    channels: list[senders.Channel]  # their url is a path until the receiver's address is known
    hooks: str
    shop_api: str


class _Cast:
    """The processes, by name."""

    def __init__(self, folder: Path, environment: Mapping[str, str], narrator: Narrator) -> None:
        self._folder, self._environment, self._narrator = folder, dict(environment), narrator
        self.processes: dict[str, Process] = {}
        (folder / "logs").mkdir(exist_ok=True)

    def start(self, name: str, *command: str | Path) -> Process:
        started = Process(command, self._environment, self._folder / "logs" / f"{name}.log", self._narrator.heard)
        self.processes[name] = started
        return started

    def module(self, name: str, module: str, *arguments: str) -> dict[str, Any]:
        """Start a stand-in of an outside service; returns its first line."""
        line: dict[str, Any] = self.start(name, sys.executable, "-m", module, *arguments).wait_for(
            f"{name}.ready", READY_WITHIN_S
        )
        return line

    def set(self, **variables: str) -> None:
        self._environment |= variables

    def start_all(self) -> str:
        """The pipeline; returns the receiver's address once every process is ready."""
        waits = {"web": "web.ready", "relay": "relay.ready", "stream": "stream.ready"}
        self.start("web", COMMAND, "web", "run", "--only", "ingest", "--port", "0")
        self.start("relay", COMMAND, "relay", "run", "--log-records")
        for worker in REGISTRY:
            self.start(worker, COMMAND, "worker", "run", worker, "--log-records")
            waits[worker] = "worker.ready"
        self.start("stream", COMMAND, "stream", "run")
        for name, event in waits.items():
            self.processes[name].wait_for(event, READY_WITHIN_S)
            self._narrator.say("stack", f"{name:<26} pid {self.processes[name].pid}")
        return str(self.processes["web"].events("web.ready")[0]["url"])

    def stop(self) -> None:
        stop_all(list(self.processes.values()))

    def note_tickets(self) -> None:
        folder = self._folder / "tickets"
        folder.mkdir(exist_ok=True)
        for name, running in self.processes.items():
            if running.returncode is None:  # verify has ended
                running.ticket().save(folder / f"{name}.json")


def _start_afresh(folder: Path) -> None:
    """The last demo's data goes, unless it is still running."""
    if any((folder / "tickets").glob("*.json")) if folder.exists() else False:
        raise LocalError("a demo that was kept is still running", hint="afluente demo --stop")
    _leave(folder)
    stack.down(folder, delete_data=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)


def _database(folder: Path, servers: stack.Stack, prefix: str, name: str) -> stack.Server:
    """The demo's own database: the stack's, or a new one on a server that the environment names.

    What the demo makes on servers that are not its own is noted first, for `_leave`.
    """
    named_kafka, named_postgres = (
        server.source is stack.Source.environment for server in (servers.kafka, servers.postgres)
    )
    guest = {
        "topics": [servers.kafka.address, prefix] if named_kafka else None,
        "database": [servers.postgres.address, name] if named_postgres else None,
    }
    process.write_private(folder / GUEST, json.dumps(guest))
    if not named_postgres:
        return servers.postgres
    with psycopg.connect(servers.postgres.address, autocommit=True) as conn:
        conn.execute(pgsql.SQL("CREATE DATABASE {}").format(pgsql.Identifier(name)))
    return stack.Server(servers.postgres.source, make_conninfo(servers.postgres.address, dbname=name))


def _leave(folder: Path) -> None:
    """Take the demo's database and topics off servers that are somebody's."""
    if not (folder / GUEST).exists():
        return
    guest = json.loads((folder / GUEST).read_text())
    if guest["topics"] is not None:
        _delete_topics(*guest["topics"])
    if guest["database"] is not None:
        address, name = guest["database"]
        with psycopg.connect(address, autocommit=True) as conn:
            conn.execute(pgsql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(pgsql.Identifier(name)))
    (folder / GUEST).unlink()


def _delete_topics(address: str, prefix: str) -> None:
    """The demo's own, on a broker that is not: nobody else's begin with this run's prefix."""
    admin = kafka.admin(KafkaSettings(bootstrap_servers=address))
    own = [topic for topic in admin.list_topics(timeout=10).topics if topic.startswith(prefix)]
    for deleted in admin.delete_topics(own).values():
        deleted.result()


def _environment(prepared: stack.Stack, prefix: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AFLUENTE_", "LOG_"))}
    return (
        own
        | prepared.environment()
        | {
            "AFLUENTE_TOPIC_PREFIX": prefix,
            "AFLUENTE_BACKOFF_SCALE": str(BACKOFF_SCALE),
            "AFLUENTE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8",  # the subscribers of the story listen on this machine
            "LOG_FORMAT": "json",
            "LOG_LEVEL": "info",
        }
    )


def _set_up(cast: _Cast, prepared: stack.Stack, narrator: Narrator) -> _Scene:
    """Stand-ins of the outside, two organizations, their connections and their subscribers."""
    receiver = cast.module("receiver", "afluente.local.services.receiver")
    hooks = f"http://{receiver['host']}:{receiver['port']}"
    shop_api = cast.module("nuvemshop", "afluente.local.services.nuvemshop")
    cast.set(AFLUENTE_NUVEMSHOP_URL=str(shop_api["url"]))
    keyring = Keyring.parse(prepared.secrets_key)
    with postgres.connect(prepared.postgres.address, application_name="afluente-demo") as conn:
        organizations = {name: organizations_named.find(conn, name, create=True) for name in ORGANIZATIONS}
        connected = [
            _connect(conn, keyring, organizations, source, organization, account)
            for source, organization, account in CHANNELS
        ]
        for name, organization, types, orders in SUBSCRIBERS:
            url = f"{hooks}/hooks/{name}"
            subscription, secret = subscriptions.create(
                conn, keyring, organization_id=organizations[organization], url=url, event_types=types, description=name
            )
            _put(f"{hooks}/control/{name}", {"secrets": [secret], **orders})
            narrator.name_target(str(subscription), name)
        *steps, call = AUTOMATION["steps"]
        written = book.create(
            conn,
            keyring,
            organizations[LOJA_AZUL],
            AUTOMATION | {"steps": [*steps, call | {"url": f"{hooks}/hooks/customers"}]},
        )
        book.set_status(conn, book.find(conn, str(written.id)), "enabled", datetime.now(UTC))
    narrator.organizations |= {str(organization_id): name for name, organization_id in organizations.items()}
    return _Scene(organizations, connected, hooks, str(shop_api["url"]))


def _connect(
    conn: psycopg.Connection[Any],
    keyring: Keyring,
    organizations: Mapping[str, UUID],
    source: str,
    organization: str,
    account: str,
) -> senders.Channel:
    # Meta signs with the app's secret, which is one for all numbers.
    secret = "demo-meta-app" if source == "whatsapp" else f"demo-{source}-{account}"
    channel_id = channels.add(
        conn,
        keyring,
        organization_id=organizations[organization],
        source=source,
        secrets={"signature": secret.encode(), **({"api_token": b"demo-token"} if source == "nuvemshop" else {})},
        external_id=account,
        settings={mapping.SETTING: mapping.example(account)} if source == "generic" else None,
        name=f"{source} of {organization}",
    )
    return senders.Channel(source, f"/webhooks/{source}/{channel_id}", secret, organization, account)


def _act(
    cast: _Cast,
    scene: _Scene,
    web: str,
    prepared: stack.Stack,
    settings: KafkaSettings,
    narrator: Narrator,
) -> int:
    """Send everything, wait until nothing is left to do, show what came of it; returns verify's exit status."""
    now = datetime.now(UTC)
    connected = [replace(channel, url=f"{web}{channel.url}") for channel in scene.channels]
    _put(f"{scene.shop_api}/control/resources", senders.resources(connected, now))
    story = senders.story(connected, now)
    told = len({channel.source for channel in connected})
    narrator.title(f"3. {len(story)} webhooks of {told} senders come in, and what follows from them")
    narrator.say("stack", f"waits between attempts are scaled by {BACKOFF_SCALE}: 30 s are 30 ms here")
    conn = postgres.connect(prepared.postgres.address, application_name="afluente-demo", autocommit=True)
    with conn, report.DelayMeter(settings, Topics(settings.topic_prefix).families()) as delays:
        for post in story:
            status = senders.send(post)
            if status != post.expect_status:
                raise LocalError(f"{post.channel.source} {post.topic} was answered {status}, not {post.expect_status}")
            note = f" ({post.note})" if post.note else ""
            who = f"{post.channel.source:<10} {post.topic:<28} {post.channel.organization:<11}"
            narrator.say("in", f"{who} {status}{note}")
        _emit_as_a_service(prepared.postgres.address, scene, narrator)
        _wait_until_quiet(cast, conn, narrator)

        narrator.title("4. What came of it")
        narrator.table("webhooks as stored", report.inbound(conn))
        narrator.table("deliveries by worker", report.deliveries(conn))
        narrator.table("runs of the automation", report.runs(conn))
        narrator.table("summaries by contact and metric", report.summaries(conn))
        dead = report.dead_letters(conn)
        narrator.table("dead letters", [{**letter, "target": narrator.target(letter["target"])} for letter in dead])
        for letter in dead[:1]:
            narrator.say(
                "dead", "to give it to its worker again, once its receiver is mended (make demo KEEP=1, and try):"
            )
            narrator.say("", f"afluente dlq retry {letter['event_id']} --reason 'receiver is back' --yes")
    narrator.title("5. How long from the commit to a consumer")
    figures = f"p50 {delays.percentile(0.5):.1f} ms, p99 {delays.percentile(0.99):.1f} ms"
    narrator.say("", f"{figures} over {len(delays.samples)} records, from the row's clock to a read_committed consumer")
    narrator.say(
        "",
        f"{len(REGISTRY) + 5} processes and two servers just started on this machine: "
        "no measure of a warm one (afluente bench)",
    )
    narrator.title("6. The reconciliation: afluente verify")
    verify = cast.start("verify", COMMAND, "--quiet", "verify")
    status = verify.wait(120)
    narrator.block(verify.log)
    return status


def _emit_as_a_service(database: str, scene: _Scene, narrator: Narrator) -> None:
    """Three facts of no webhook: what a service of the CRM, or your own, commits beside its rows."""
    won, lost = uuid4(), uuid4()
    at = datetime.now(UTC).isoformat()
    facts: tuple[tuple[str, str, str, UUID, dict[str, Any]], ...] = (
        (CASA_VERDE, "lead.won", "lead", won, {"value": "499.00", "won_at": at, "reason": "curso"}),
        (LOJA_AZUL, "lead.lost", "lead", lost, {"reason": "preço", "lost_at": at}),
        (LOJA_AZUL, "loyalty.points_added", "loyalty_card", uuid4(), {"points": 120, "because": "aniversário"}),
    )
    with postgres.connect(database, application_name="afluente-demo") as conn:
        for organization, event_type, entity_kind, entity_id, payload in facts:
            producers.emit(
                conn,
                event_type,
                entity_kind=entity_kind,
                entity_id=entity_id,
                payload=payload,
                organization_id=scene.organizations[organization],
                source="demo",
            )
            narrator.say("in", f"{'emit':<10} {event_type:<28} {organization}")


def _wait_until_quiet(cast: _Cast, conn: psycopg.Connection[Any], narrator: Narrator) -> None:
    """Until every committed event is done or dead with every worker. What follows from an event is committed with its
    delivery, so that nothing can appear behind a look that finds nothing open."""
    deadline = time.monotonic() + QUIET_WITHIN_S
    while (left := report.open_events(conn)) > 0:
        if ended := [name for name, running in cast.processes.items() if running.returncode is not None]:
            raise LocalError(f"{', '.join(ended)} ended before the story did", log=cast.processes[ended[0]].log_path)
        if time.monotonic() > deadline:
            raise LocalError(f"{left} events are still open after {QUIET_WITHIN_S:.0f} s", hint="look at the logs")
        time.sleep(LOOK_EVERY_S)


@contextmanager
def _stopped(cast: _Cast, keep: bool) -> Iterator[None]:
    """End the processes with the demo; when it is kept, only if it fails."""
    try:
        yield
    except BaseException:
        cast.stop()
        raise
    if not keep:
        cast.stop()


def _say_kept(
    folder: Path,
    prepared: stack.Stack,
    scene: _Scene,
    web: str,
    environment: Mapping[str, str],
    narrator: Narrator,
) -> None:
    ours = [name for name in environment if name.startswith("AFLUENTE_")] + list(prepared.environment())
    lines = [f"export {name}={shlex.quote(environment[name])}" for name in sorted(set(ours))]
    process.write_private(folder / "env", "\n".join(lines) + "\n")
    narrator.title("It is left running")
    for text in (
        f"receiver    {web}",
        f"Kafka       {prepared.kafka.address}",
        f"logs        {folder / 'logs'}",
        f"to use it   source {folder / 'env'}; afluente relay status; afluente dlq list",
        f"mend it     curl -X PUT {scene.hooks}/control/never-works -H 'Content-Type: application/json' "
        '-d \'{"then": {"do": "answer", "status": 200}}\'',
        "and then    afluente dlq retry --worker webhook-dispatch-worker --reason mended --yes; afluente dlq list",
        f"an event    afluente emit order.packed --org {scene.organizations[LOJA_AZUL]} --entity order",
        "to end it   afluente demo --stop",
    ):
        narrator.say("", text)


def _put(url: str, document: Mapping[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(document).encode(), method="PUT")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()
