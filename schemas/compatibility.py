"""May a reader with one schema read what was written with the other, and mean the same by it?

Both directions count: new readers meet old records (replay, a topic's backlog), old readers meet new records (a deploy
is never at one moment everywhere). And emitters count: a payload that was accepted stays accepted within a major. So a
change is compatible when the old and the new schema can each read what the other wrote, nothing that could be said
cannot be said any more, and nothing changes its meaning in silence.

Avro's own resolution rules are avro.compatibility's business; here stand the changes that it lets pass.
"""

import json
from typing import Any

Schema = dict[str, Any]

_NAMED = ("record", "enum", "fixed")


def breaking_changes(older: Schema, newer: Schema) -> list[str]:
    """Why ``newer`` must not follow ``older`` within a major, one sentence each with a path; empty when it may."""
    return [*_unresolvable(older, newer), *_Comparison(older, newer).problems()]


def _unresolvable(older: Schema, newer: Schema) -> list[str]:
    # A development dependency: schemas change on a developer's machine and in CI, not where they are used.
    from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
    from avro.schema import parse

    problems: list[str] = []
    # Logical types are compared by us; avro warns about each one it does not know.
    old, new = (parse(json.dumps(_without_logical_types(schema))) for schema in (older, newer))
    for reader, writer, who in ((new, old, "a new reader of old records"), (old, new, "an old reader of new records")):
        checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]  # avro types it half-way
        result = checker.get_compatibility(reader, writer)
        if result.compatibility is not SchemaCompatibilityType.compatible:
            problems.append(f"{who}: {', '.join(sorted(result.messages))} at {', '.join(sorted(result.locations))}")
    return problems


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(branch) for branch in schema]
    if isinstance(schema, dict):
        return {
            key: value if key in ("default", "symbols", "aliases") else _without_logical_types(value)
            for key, value in schema.items()
            if key not in ("logicalType", "precision", "scale")
        }
    return schema


class _Comparison:
    """Walks both schemas side by side, along what they have in common."""

    def __init__(self, older: Schema, newer: Schema) -> None:
        self._older, self._newer = older, newer
        self._old_names: dict[str, Schema] = {}
        self._new_names: dict[str, Schema] = {}
        _collect(older, "", self._old_names)
        _collect(newer, "", self._new_names)
        self._seen: set[tuple[str, str]] = set()
        self._problems: list[str] = []

    def problems(self) -> list[str]:
        self._compare(self._older, self._newer, "", "", "")
        return self._problems

    def _say(self, path: str, text: str) -> None:
        self._problems.append(f"{path or 'the record'}: {text}")

    def _compare(self, older: Any, newer: Any, path: str, old_space: str, new_space: str) -> None:
        older, old_space = _resolve(older, old_space, self._old_names)
        newer, new_space = _resolve(newer, new_space, self._new_names)
        if isinstance(older, list) or isinstance(newer, list):
            self._compare_unions(older, newer, path, old_space, new_space)
            return
        old_kind, new_kind = older["type"], newer["type"]
        if old_kind != new_kind:
            # Avro promotes string to bytes and back, so its rules find nothing: the reader gets another thing all the
            # same.
            if {old_kind, new_kind} == {"string", "bytes"}:
                self._say(path, f"{old_kind} became {new_kind}")
            return
        for key, what in (("logicalType", "meaning"), ("precision", "precision"), ("scale", "scale")):
            if older.get(key) != newer.get(key):
                self._say(path, f"its {what} changed from {older.get(key)} to {newer.get(key)} on the same bytes")
        if old_kind in _NAMED:
            old_name, new_name = _full_name(older, old_space), _full_name(newer, new_space)
            if old_name != new_name:
                self._say(path, f"{old_name} was renamed to {new_name}")
            if (old_name, new_name) in self._seen:
                return
            self._seen.add((old_name, new_name))
        old_space = older.get("namespace", old_space)
        new_space = newer.get("namespace", new_space)
        match old_kind:
            case "record":
                self._compare_fields(older, newer, path, old_space, new_space)
            case "enum":
                self._compare_symbols(older, newer, path)
            case "array":
                self._compare(older["items"], newer["items"], f"{path}[]", old_space, new_space)
            case "map":
                self._compare(older["values"], newer["values"], f"{path}{{}}", old_space, new_space)

    def _compare_unions(self, older: Any, newer: Any, path: str, old_space: str, new_space: str) -> None:
        """Branches are matched by what they are; a branch too many or too few is Avro's to judge."""
        for old_branch in older if isinstance(older, list) else [older]:
            for new_branch in newer if isinstance(newer, list) else [newer]:
                old_type, _ = _resolve(old_branch, old_space, self._old_names)
                new_type, _ = _resolve(new_branch, new_space, self._new_names)
                if old_type["type"] == new_type["type"] and old_type.get("name") == new_type.get("name"):
                    self._compare(old_branch, new_branch, path, old_space, new_space)

    def _compare_fields(self, older: Schema, newer: Schema, path: str, old_space: str, new_space: str) -> None:
        new_fields = {field["name"]: field for field in newer["fields"]}
        for field in older["fields"]:
            where = f"{path}.{field['name']}".lstrip(".")
            other = new_fields.get(field["name"])
            if other is None:
                renamed = next((f["name"] for f in newer["fields"] if field["name"] in f.get("aliases", ())), None)
                if renamed is not None:
                    self._say(where, f"was renamed to {renamed}: emitters go on saying {field['name']}")
                continue
            if "default" in field and "default" not in other:
                self._say(where, "could be missing and is required now: emitters that leave it out would be refused")
            self._compare(field["type"], other["type"], where, old_space, new_space)

    def _compare_symbols(self, older: Schema, newer: Schema, path: str) -> None:
        lost = [symbol for symbol in older["symbols"] if symbol not in newer["symbols"]]
        if lost:
            self._say(path, f"lost the symbols {', '.join(lost)}: old records would be read as the default")
        if "default" in older and older.get("default") != newer.get("default"):
            self._say(path, f"its default changed from {older['default']} to {newer.get('default')}")


def _collect(schema: Any, namespace: str, names: dict[str, Schema]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, namespace, names)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if kind in _NAMED:
            names[_full_name(schema, namespace)] = schema
            namespace = schema.get("namespace", namespace)
        if isinstance(kind, dict | list):
            _collect(kind, namespace, names)
        _collect(schema.get("items"), namespace, names)
        _collect(schema.get("values"), namespace, names)
        for field in schema.get("fields", ()):
            _collect(field["type"], namespace, names)


def _full_name(schema: Schema, namespace: str) -> str:
    name: str = schema["name"]
    space = schema.get("namespace", namespace)
    return name if "." in name or not space else f"{space}.{name}"


def _resolve(schema: Any, namespace: str, names: dict[str, Schema]) -> tuple[Any, str]:
    """A type written out: a name looked up, a primitive as a dict; and the namespace it is in."""
    if isinstance(schema, str):
        full = schema if "." in schema or not namespace else f"{namespace}.{schema}"
        found = names.get(full, names.get(schema))
        return ({"type": schema}, namespace) if found is None else (found, full.rpartition(".")[0])
    if isinstance(schema, dict) and isinstance(schema.get("type"), dict | list):
        return _resolve(schema["type"], namespace, names)
    return schema, namespace
