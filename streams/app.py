"""The Faust app, and nothing else: its settings, and what it refuses to run with.

Faust gives assignment, rebalancing and the process model. Exactness is not its business: it comes from the fences in
Postgres (`streams.summaries.sink`), so what Faust offers for it is switched off or refused. exactly_once crashes at a
rebalance and was wrong when measured; isolated partitions end the worker at a rebalance; tables would be a second
truth.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import faust
from faust.tables.manager import TableManager
from faust.types.enums import ProcessingGuarantee

from afluente.settings import KafkaSettings, SecurityProtocol
from streams import record_batches
from streams.consumer import BulkTransport, Folding, check_versions
from streams.errors import Unfit

APP_ID = "afluente-stream"

SESSION_TIMEOUT_S = 10.0
HEARTBEAT_S = 3.0
REBALANCE_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 30.0
FETCH_RECORDS = 2000
FETCH_BYTES = 1024 * 1024  # for each partition, so this times the partitions bounds what is held in memory


class NoTables(TableManager):
    """Faust waits a second for tables to be declared. There are none, and a second is half of a restart."""

    async def on_start(self) -> None:
        await self._update_channels()
        await self.recovery.start()


class StreamApp(faust.App):
    """A Faust app whose consumer hands whole fetches to `folding`."""

    folding: Folding

    def _new_transport(self) -> Any:
        return BulkTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """No tables, so nothing to keep in a directory."""


def build(kafka: KafkaSettings, folding: Folding, *, member_id: str, web_port: int | None = None) -> StreamApp:
    """The app, subscribed to the folding's topic. Unfit when it would run with settings that lose or double events.

    `member_id` is the static name of this replica in the group: with it a restart after kill -9 goes on at once; two
    processes with the same one throw each other out. `web_port`: Faust's own pages on the loopback address.
    """
    check_versions()
    record_batches.install()
    app = StreamApp(
        kafka.group_id(APP_ID),
        broker=[f"kafka://{server.strip()}" for server in kafka.bootstrap_servers.split(",")],
        broker_credentials=_credentials(kafka),
        broker_session_timeout=SESSION_TIMEOUT_S,
        broker_heartbeat_interval=HEARTBEAT_S,
        broker_rebalance_timeout=REBALANCE_TIMEOUT_S,
        broker_request_timeout=REQUEST_TIMEOUT_S,
        broker_max_poll_records=FETCH_RECORDS,
        consumer_max_fetch_size=FETCH_BYTES,
        consumer_auto_offset_reset="earliest",
        consumer_group_instance_id=member_id,
        processing_guarantee="at_least_once",
        store="memory://",
        TableManager=NoTables,
        stream_wait_empty=False,
        stream_recovery_delay=0,
        table_standby_replicas=0,
        topic_allow_declare=False,
        topic_disable_leader=True,
        worker_redirect_stdouts=False,
        autodiscover=False,
        datadir=Path("."),
        env={},  # else variables such as BROKER_URL or PROCESSING_GUARANTEE would override all of this
        web_enabled=web_port is not None,
        web_host="127.0.0.1",
        web_bind="127.0.0.1",
        web_port=web_port or 6066,
    )
    app.folding = folding
    app.topics.add(app.topic(folding.topic, key_serializer="raw", value_serializer="raw"))
    check(app)
    return app


def check(app: faust.App) -> None:
    """Refuse what would make the result wrong, however it got into the settings."""
    if str(app.conf.processing_guarantee) != str(ProcessingGuarantee.AT_LEAST_ONCE):
        raise Unfit(
            "processing_guarantee=exactly_once loses events at a rebalance",
            hint="leave it out: the fences give exactness",
        )
    if str(app.conf.store) not in ("memory:", "memory://"):
        raise Unfit(f"store={app.conf.store}: there are no tables to store", hint="leave it out")
    for name, agent in app.agents.items():
        if agent.isolated_partitions:
            raise Unfit(
                f"agent {name} has isolated_partitions, which end the process at a rebalance", hint="leave it out"
            )


def _credentials(kafka: KafkaSettings) -> Any:
    """Faust's form of the connection's security, or None."""
    context = None
    if kafka.security_protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL):
        context = ssl.create_default_context(cafile=kafka.ssl_ca_location)
        if kafka.ssl_certificate_location:
            context.load_cert_chain(kafka.ssl_certificate_location, kafka.ssl_key_location)
    if kafka.security_protocol in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL):
        return faust.SASLCredentials(
            mechanism=kafka.sasl_mechanism or "PLAIN",
            username=kafka.sasl_username,
            password=kafka.sasl_password.get_secret_value() if kafka.sasl_password else None,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None
