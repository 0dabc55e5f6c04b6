"""The workers, one module each; one worker is one consumer group. `REGISTRY` finds a worker's class by its name."""

from __future__ import annotations

import importlib
import os
import sys

from consumers.errors import BadWorker, UnknownWorker
from consumers.worker import Worker

REGISTRY: dict[str, str] = {
    "webhook-normalize-worker": "consumers.workers.webhook_normalize:WebhookNormalizeWorker",
    "webhook-fetch-worker": "consumers.workers.webhook_fetch:WebhookFetchWorker",
    "webhook-dispatch-worker": "consumers.workers.webhook_dispatch:WebhookDispatchWorker",
    "automation-worker": "consumers.workers.automation:AutomationWorker",
    "automation-call-worker": "consumers.workers.automation_call:AutomationCallWorker",
}


def load(name: str) -> type[Worker]:
    """The class of a worker, by its name in `REGISTRY` or as `module:Class`. Refused (UnknownWorker, BadWorker)."""
    module_name, _, class_name = REGISTRY.get(name, name).partition(":")
    if not class_name:
        raise UnknownWorker(name, sorted(REGISTRY))
    # a module:Class is the user's own, and lies where the command is run
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise  # the module is there, and lacks one of its own
        raise BadWorker(f"no module is called {module_name!r} here", hint="run it where the module lies") from None
    except AttributeError:
        raise BadWorker(f"module {module_name} has no class {class_name}") from None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise BadWorker(f"{name} is not a Worker", hint="derive it from TransactionalWorker or ExternalWorker")
    return found


def spelling(worker: type[Worker]) -> str:
    """How to name a worker on the command line: what `load` takes."""
    own = f"{worker.__module__}:{worker.__qualname__}"
    return worker.name if REGISTRY.get(worker.name) == own else own
