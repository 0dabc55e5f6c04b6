"""What a mapping may hold, out of the model itself: for people who write one."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from producers.ingest.mapping import model
from producers.ingest.mapping.paths import Path

# Described once, by the command: they stand in every second field.
_LEAVES = {model.Value: "value", model.Time: "time", model.Money: "amount", model.Property: "property", Path: "path"}


def fields(of: type[BaseModel] = model.Mapping, place: str = "") -> Iterator[dict[str, Any]]:
    """Every field in order: its place, what it is, whether it is required, and what it means."""
    for name, field in of.model_fields.items():
        here = f"{place}.{field.alias or name}" if place else field.alias or name
        inner, what, many = _kind(field.annotation)
        here += "[]" if many else ""
        yield {
            "field": here,
            "what": what,
            "required": field.is_required(),
            "meaning": field.description or " ".join((m.__doc__ or "").split("\n")[0] for m in inner),
        }
        for one in inner:
            yield from fields(one, f"{here}({_name(one)})" if len(inner) > 1 else here)


def _name(of: type[BaseModel]) -> str:
    return of.__name__.lower()


def _kind(annotation: Any) -> tuple[list[type[BaseModel]], str, bool]:
    """The models in a type, a word for it, and whether it is a list of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin is Literal:
        return [], ", ".join(repr(one).replace("'", "") or '""' for one in get_args(annotation)), False
    if origin is tuple:
        inner, what, _ = _kind(get_args(annotation)[0])
        return inner, what, True
    if origin is dict:
        inner, what, _ = _kind(get_args(annotation)[1])
        return inner, f"object of {what}", False
    if origin in (Union, types.UnionType):
        kinds = [_kind(one) for one in get_args(annotation) if one is not type(None)]
        words = dict.fromkeys(what for _, what, _ in kinds)
        return [m for inner, _, _ in kinds for m in inner], " or ".join(words), any(many for _, _, many in kinds)
    if annotation in _LEAVES:
        return [], _LEAVES[annotation], False
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], "object", False
    words_of = {str: "text", bool: "true or false", int: "number"}
    return [], words_of.get(annotation, "value"), False
