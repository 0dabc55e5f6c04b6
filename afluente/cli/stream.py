"""`afluente stream`: fold contact events into the summaries, and see how far that is."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from afluente.cli import output
from afluente.cli.registry import use_registry
from afluente.settings import StreamSettings
from schemas.topics import Environment, Topics, declared

EVENT_TYPE = "contact_event.recorded"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Fold contact events into summaries.")


@app.command()
def run(
    member_id: Annotated[
        str | None,
        typer.Option(
            envvar="AFLUENTE_STREAM_MEMBER_ID",
            help="stable name of this replica in the group; two replicas must not share one [default: the host's name]",
        ),
    ] = None,
    web_port: Annotated[
        int | None, typer.Option(help="show Faust's monitor on 127.0.0.1 at this port [default: no web server]")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="seconds with records waiting and no progress after which the process ends")
    ] = 60.0,
) -> None:
    """Run the stream application: events.contact-event into contact_metrics_summary, each contact event once.

    Runs until SIGTERM (status 0). 70: an error it cannot wait out, or its partitions are another's. 71: stuck. In all
    cases start it again: it goes on where the summaries are.

    \b
    Examples:
      afluente stream run
      afluente stream run --member-id stream-1 --web-port 6066
    """
    settings = StreamSettings.read(os.environ)
    use_registry(settings.kafka.topic_prefix)
    kafka = settings.kafka
    topic = Topics(kafka.topic_prefix).event(EVENT_TYPE)
    # Imported here: Faust takes a while, and `--help` and `status` do not need it.
    from streams import service

    service.run(
        kafka,
        settings.postgres.dsn,
        topic=topic,
        partitions=_declared_partitions(settings, topic),
        member_id=member_id or socket.gethostname(),
        web_port=web_port,
        patience_s=patience,
    )


@app.command()
def status(format: output.FormatOption = output.Format.text) -> None:
    """Show how far the summaries are behind the topic, what they hold, and how many records could not be folded.

    \b
    Examples:
      afluente stream status
      afluente stream status --format json | jq .lag
    """
    settings = StreamSettings.read(os.environ)
    from afluente import postgres
    from streams import status as reading

    with postgres.connect(settings.postgres.dsn, application_name="afluente-cli") as conn:
        found = reading.status(conn, settings.kafka, Topics(settings.kafka.topic_prefix).event(EVENT_TYPE))
    if format in (output.Format.json, output.Format.jsonl):
        output.show(found, format)
        return
    if format == output.Format.text:
        output.show(found, format, ["generation", "topic", "lag", "summaries", "events", "dead_letters"])
        print()
    output.show(found.partitions, format)


@app.command(name="dead-letters")
def dead_letters(
    limit: Annotated[int, typer.Option(min=1, help="how many, newest first")] = 50,
    format: output.FormatOption = output.Format.text,
) -> None:
    """List the records that could not be folded, with the reason. Their bytes are kept in stream_dead_letter.

    \b
    Examples:
      afluente stream dead-letters
      afluente stream dead-letters --limit 500 --format csv
    """
    settings = StreamSettings.read(os.environ)
    from afluente import postgres
    from streams import status as reading

    with postgres.connect(settings.postgres.dsn, application_name="afluente-cli") as conn:
        found = reading.dead_letters(conn, limit)
    columns = ["recorded_at", "topic", "partition", "record_offset", "organization_id", "bytes", "reason"]
    output.show(found, format, columns if found or format == output.Format.csv else [])


def _declared_partitions(settings: StreamSettings, topic: str) -> int:
    environment: Environment = settings.environment.environment.value
    return next(
        spec.partitions for spec in declared(environment, (), settings.kafka.topic_prefix) if spec.name == topic
    )
