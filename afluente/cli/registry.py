"""The schema registry of a command that reads or writes records, when the environment names one."""

from __future__ import annotations

import os


def use_registry(topic_prefix: str, *, writes: bool = False) -> None:
    """Decode with the registry of SCHEMA_REGISTRY_URL; with `writes` also encode with its ids. Without it: nothing."""
    from afluente.settings import RegistrySettings

    if (url := RegistrySettings.read(os.environ).url) is not None:
        from afluente.kafka import schema_registry

        schema_registry.use(url, topic_prefix, writes=writes)
