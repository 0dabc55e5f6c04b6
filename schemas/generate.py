"""From the models to the committed ``.avsc`` files.

What must stay true: the same models give the same bytes, on every machine; a published file is never touched again, so
a change of a model becomes a new version of its schema (a minor one, or it is refused); numbers only ever grow.
"""

import hashlib
import json
import types
import typing
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from schemas import catalogue
from schemas.catalogue import Contract
from schemas.compatibility import breaking_changes
from schemas.errors import IncompatibleSchema
from schemas.events.base import Mark, Payload
from schemas.published import CUSTOM, Published, read_ids

AVRO_DIRECTORY = Path(__file__).parent / "avro"
IDS_FILE = "ids.json"

Schema = dict[str, Any]

_UNKNOWN = "unknown"  # what an old reader makes of a symbol that is newer than itself; never written


def envelope_schema(name: str, namespace: str, doc: str, payload: Any) -> Schema:
    """The record that every event is: the envelope, and the payload typed as given."""
    uuid = {"type": "string", "logicalType": "uuid"}
    return {
        "type": "record",
        "name": name,
        "namespace": namespace,
        "doc": doc,
        "fields": [
            {"name": "id", "type": uuid},
            {"name": "organization_id", "type": uuid},
            {"name": "event_type", "type": "string"},
            {"name": "entity_kind", "type": "string"},
            {"name": "entity_id", "type": ["null", uuid]},
            {"name": "created_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "metadata", "type": {"type": "string", "logicalType": "json"}},
            {"name": "payload", "type": payload},
        ],
    }


def schema_of(contract: Contract) -> Schema:
    """The Avro schema of one contract."""
    family, action = contract.event_type.split(".", 1)
    namespace = f"afluente.{family}.v{contract.major}"
    name = _camel(contract.variant or action)
    writer = _Writer()
    payload = writer.record(contract.model, f"{name}Payload", contract.properties)
    doc = (contract.properties or contract.model) if contract.variant else contract.model
    return envelope_schema(name, namespace, _doc(doc), payload)


def custom_schema() -> Schema:
    """The schema of every event type outside the catalogue: the payload is its JSON text."""
    doc = "An event of a type that the catalogue does not know; the payload is JSON text."
    return envelope_schema("Event", "afluente.custom.v1", doc, {"type": "string", "logicalType": "json"})


def render(schema: Schema) -> str:
    """The bytes of a file, as text: stable, readable, one trailing newline."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def generate(directory: Path, now: datetime) -> list[Published]:
    """Write what the models say and ``directory`` does not have yet; return what was added, oldest number first.

    Raises IncompatibleSchema, with nothing written, when a model changed in a way that its major does not allow.
    """
    ids = directory / IDS_FILE
    held = read_ids(ids.read_text("utf-8")) if ids.exists() else []
    added: list[tuple[Published, str]] = []
    for event_type, variant, major, schema in _wanted():
        versions = [p for p in held if (p.event_type, p.variant, p.major) == (event_type, variant, major)]
        text = render(schema)
        newest = max(versions, key=lambda p: p.order, default=None)
        if newest is not None and (directory / newest.file).read_text("utf-8") == text:
            continue
        for version in versions:
            older = json.loads((directory / version.file).read_text("utf-8"))
            if problems := breaking_changes(older, schema):
                raise IncompatibleSchema(f"{event_type} {variant} against {version.version}".strip(), problems)
        version_text = _next_version(major, newest, directory, schema)
        family, action = event_type.split(".", 1)
        added.append(
            (
                Published(
                    number=max((p.number for p in held), default=0) + len(added) + 1,
                    name=f"{schema['namespace']}.{schema['name']}",
                    event_type=event_type,
                    variant=variant,
                    version=version_text,
                    published=now,
                    sha256=hashlib.sha256(text.encode()).hexdigest(),
                    file=f"{family.replace('_', '-')}/{variant or action}-{version_text}.avsc",
                ),
                text,
            )
        )
    for entry, text in added:
        path = directory / entry.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    if added:
        # Last: an entry whose file is missing would break every reader, a file without an entry only waits.
        ids.write_text(_render_ids([*held, *(entry for entry, _ in added)]), "utf-8")
    return [entry for entry, _ in added]


def incompatibilities(directory: Path) -> list[str]:
    """Published versions of one major that cannot follow each other, and majors without a way to the next."""
    held = read_ids((directory / IDS_FILE).read_text("utf-8"))
    findings = []
    for index, older in enumerate(held):
        for newer in held[index + 1 :]:
            if (older.event_type, older.variant, older.major) == (newer.event_type, newer.variant, newer.major):
                schemas = [json.loads((directory / entry.file).read_text("utf-8")) for entry in (older, newer)]
                findings += [f"{newer.file} after {older.file}: {text}" for text in breaking_changes(*schemas)]
    for event_type, models in catalogue.MAJORS.items():
        findings += [
            f"{event_type} major {major} has no upcaster"
            for major in range(1, len(models))
            if (event_type, major) not in catalogue.UPCASTERS
        ]
    return findings


def drift(directory: Path) -> list[str]:
    """What the committed files and the models disagree about, one sentence each; empty when they agree."""
    held = read_ids((directory / IDS_FILE).read_text("utf-8"))
    findings = []
    for entry in held:
        path = directory / entry.file
        if not path.exists():
            findings.append(f"{entry.file} is published under number {entry.number} and missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
            findings.append(f"{entry.file} was changed after it was published; restore it, change the model instead")
    known = {entry.file for entry in held}
    findings += [
        f"{path.relative_to(directory)} is not in {IDS_FILE}"
        for path in sorted(directory.rglob("*.avsc"))
        if str(path.relative_to(directory)) not in known
    ]
    wanted = {(event_type, variant, major): schema for event_type, variant, major, schema in _wanted()}
    for key, schema in wanted.items():
        versions = [p for p in held if (p.event_type, p.variant, p.major) == key]
        newest = max(versions, key=lambda p: p.order, default=None)
        what = f"{key[0]} {key[1]}".strip()
        if newest is None:
            findings.append(f"{what} major {key[2]} has a model and no schema; run `afluente schemas generate`")
        elif (directory / newest.file).exists() and (directory / newest.file).read_text("utf-8") != render(schema):
            findings.append(f"{what} differs from {newest.file}; run `afluente schemas generate`")
    findings += [
        f"{entry.event_type} {entry.variant} major {entry.major} is published and has no model any more"
        for entry in held
        if (entry.event_type, entry.variant, entry.major) not in wanted
    ]
    return findings


def _next_version(major: int, newest: Published | None, directory: Path, schema: Schema) -> str:
    """A new field or symbol is a minor version; other words about the same fields are a patch."""
    if newest is None:
        return f"{major}.0.0"
    _, minor, patch = newest.order
    held = json.loads((directory / newest.file).read_text("utf-8"))
    same = _without_docs(held) == _without_docs(schema)
    return f"{major}.{minor}.{patch + 1}" if same else f"{major}.{minor + 1}.0"


def _without_docs(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_docs(part) for part in schema]
    if isinstance(schema, dict):
        return {key: _without_docs(value) for key, value in schema.items() if key != "doc"}
    return schema


def _wanted() -> list[tuple[str, str, int, Schema]]:
    schemas = [(c.event_type, c.variant, c.major, schema_of(c)) for c in catalogue.contracts()]
    return [*schemas, (CUSTOM, "", 1, custom_schema())]


def _render_ids(entries: list[Published]) -> str:
    # One line for each entry: a diff of this file then shows what was published, and nothing else.
    lines = [
        json.dumps(
            {
                "number": e.number,
                "name": e.name,
                "event_type": e.event_type,
                "variant": e.variant,
                "version": e.version,
                "published": e.published.isoformat(timespec="seconds"),
                "sha256": e.sha256,
                "file": e.file,
            }
        )
        for e in entries
    ]
    return '{"schemas": [\n' + ",\n".join(lines) + "\n]}\n"


class _Writer:
    """Turns models into Avro types; a named type is written out once and referred to afterwards, as Avro wants."""

    def __init__(self) -> None:
        self._written: set[str] = set()

    def record(self, model: type[Payload], name: str, properties: type[Payload] | None = None) -> Any:
        if name in self._written:
            return name
        self._written.add(name)
        hints = typing.get_type_hints(model, include_extras=True)
        fields = []
        for attribute, info in model.model_fields.items():
            if info.default is not PydanticUndefined and info.default is not None:
                raise TypeError(f"{model.__name__}.{attribute}: None is the only default that a schema may have")
            field_name = info.alias or attribute
            hint = hints[attribute]
            # Any takes None too: the question is only whether the model says `| None`.
            inner, nullable = _without_none(hint)
            avro = self.type(inner, f"{name.removesuffix('Payload')}{_camel(field_name)}")
            field: Schema = {"name": field_name, "type": ["null", avro] if nullable else avro}
            if nullable and not info.is_required():
                field["default"] = None
            elif not info.is_required():
                raise TypeError(f"{model.__name__}.{attribute}: a field that may be missing is `| None`")
            fields.append(field)
        if properties is not None:
            fields.append(
                {"name": "properties", "type": self.record(properties, f"{name.removesuffix('Payload')}Properties")}
            )
        # JSON text of each field that is not declared, or that its type does not hold to the letter.
        json_text = {"type": "string", "logicalType": "json"}
        fields.append({"name": "extra", "type": {"type": "map", "values": json_text}, "default": {}})
        return {"type": "record", "name": name, "doc": _doc(model), "fields": fields}

    def type(self, hint: Any, name: str) -> Any:
        marks = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Mark)]
        if marks:
            match marks[0].form:
                case "amount":
                    return {"type": "string", "logicalType": "decimal-text"}
                case "instant":
                    return {"type": "long", "logicalType": "timestamp-micros"}
                case "json":
                    return {"type": "string", "logicalType": "json"}
        origin = get_origin(hint)
        if origin is list:
            return {"type": "array", "items": self._element(get_args(hint)[0], name)}
        if origin is dict:
            key, value = get_args(hint)
            if key is not str:
                raise TypeError(f"{name}: the keys of a map are text")
            return {"type": "map", "values": self._element(value, name)}
        if origin is Literal:
            return self._enum(list(get_args(hint)), name)
        if isinstance(hint, type) and issubclass(hint, Payload):
            return self.record(hint, hint.__name__)
        plain = {str: "string", bool: "boolean", int: "long", float: "double"}
        if hint in plain:
            return plain[hint]
        raise TypeError(f"{name}: {hint!r} has no Avro form; see schemas.events.base for what a payload may hold")

    def _element(self, hint: Any, name: str) -> Any:
        avro = self.type(hint, name)
        if isinstance(avro, dict) and avro.get("logicalType") in ("decimal-text", "timestamp-micros"):
            raise TypeError(f"{name}: amounts and moments in a list have no `extra` beside them; use a model")
        return avro

    def _enum(self, symbols: list[str], name: str) -> Any:
        # A default of its own, so that a reader of today survives a symbol of tomorrow without taking it for another.
        if name in self._written:
            return name
        self._written.add(name)
        return {"type": "enum", "name": name, "symbols": [*symbols, _UNKNOWN], "default": _UNKNOWN}


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        members = [m for m in get_args(hint) if m is not type(None)]
        if len(members) != 1:
            raise TypeError(f"{hint!r}: a field has one type, or one type and None")
        return members[0], len(members) != len(get_args(hint))
    return hint, False


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _doc(model: type[Payload]) -> str:
    return " ".join((model.__doc__ or "").split())
