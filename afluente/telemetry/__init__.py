"""Structured logs: one stable event name plus fields, as text for people or JSON for machines, without personal data.

`log = telemetry.get_logger(__name__)`, then `log.info("relay.published", topic=..., partition=..., offset=...)`. Every
event name is in `names.EVENTS`. Lines go to stderr: stdout belongs to the data that commands show. What the standard
library's loggers say (Faust, aiokafka, librdkafka) takes the same way out, as event `library.log`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from afluente.telemetry import heartbeat
from afluente.telemetry.redact import redact

__all__ = ["bind", "configure", "get_logger", "heartbeat"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger; `name` becomes the field `logger`. May be called on import: it takes its shape at the first line."""
    return cast(FilteringBoundLogger, structlog.get_logger(logger_name=name))


bind = structlog.contextvars.bind_contextvars


def configure(level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
    """Set how this process logs. Called once by the command line; calling again replaces it."""
    stream = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _named,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # before the masking: tracebacks quote payloads
        _redacted,
    ]
    renderer: Any
    if format == "json":
        renderer = structlog.processors.JSONRenderer(default=str, ensure_ascii=False)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[_from_library, structlog.stdlib.ProcessorFormatter.remove_processors_meta, _redacted, renderer],
            foreign_pre_chain=[*shared],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries are heard from warning on, unless we debug: Faust and aiokafka tell their life at info.
    root.setLevel(logging.DEBUG if level == "debug" else max(_LEVELS[level], logging.WARNING))
    for chatty in ("asyncio", "aiokafka", "faust", "mode", "urllib3"):
        logging.getLogger(chatty).setLevel(max(_LEVELS[level], logging.WARNING))


def _named(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    # structlog has an argument called logger, so the field cannot be given by that name.
    if (name := event.pop("logger_name", None)) is not None:
        event["logger"] = name
    return event


def _from_library(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    return {
        **event,
        "event": "library.log",
        "message": event.get("event"),
        "logger": record.name if isinstance(record, logging.LogRecord) else None,
    }


def _redacted(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {
        key: value if key in ("event", "timestamp", "level", "logger") else redact(key, value)
        for key, value in event.items()
    }
