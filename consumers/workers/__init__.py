"""The workers, one module each; one worker is one consumer group. `REGISTRY` finds a worker's class by its name."""

from __future__ import annotations

import importlib

from consumers.errors import UnknownWorker
from consumers.worker import Worker

REGISTRY: dict[str, str] = {
    "webhook-normalize-worker": "consumers.workers.webhook_normalize:WebhookNormalizeWorker",
    "webhook-fetch-worker": "consumers.workers.webhook_fetch:WebhookFetchWorker",
    "webhook-dispatch-worker": "consumers.workers.webhook_dispatch:WebhookDispatchWorker",
}


def load(name: str) -> type[Worker]:
    """The class of a worker, by its name in `REGISTRY` or as `module:Class`. UnknownWorker when there is none."""
    module_name, _, class_name = REGISTRY.get(name, name).partition(":")
    if not class_name:
        raise UnknownWorker(name, sorted(REGISTRY))
    found = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise UnknownWorker(name, sorted(REGISTRY))
    return found
