"""Writers made for one schema: Python source out of the schema, for payloads that hold what is usual.

What must stay true: the bytes are those of codec's walk along the schema, or there are none. Whatever is not plain (a
field too many, another kind of value, a moment in another form, a very long text) raises, and then codec walks: it
writes the rest of what may be written and has the words for what may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Write = Callable[[list[bytes], Mapping[str, Any]], bytes]
"""(what stands before the payload, the payload) -> all of it; uses the list up. Any exception: not by this way."""

Put = Callable[[Any, bytearray, dict[str, str], str], None]

_NEVER_FLOATS = frozenset({"string", "boolean", "long"})


def writer(kind: Mapping[str, Any], put: Callable[[Any], Put], lengths: list[bytes], present: list[bytes]) -> Write:
    """The writer of payloads of the record `kind`. `put`: codec's way to write a type; `lengths[n]`: n in Avro;
    `present[n]`: the same after the branch of T in ["null", T]."""
    names: dict[str, Any] = {"L": lengths, "P": present, "M": object(), "join": b"".join, "no": _no}
    code = ["def write(front, value):"]
    parts: list[str] = []
    empty = "b'\\0'"  # the map of what nobody declared
    required, conditional = 0, False
    for number, field in enumerate(kind["fields"][:-1]):
        var, name, inner = f"v{number}", repr(field["name"]), field["type"]
        optional, nullable = "default" in field, isinstance(inner, list)
        if nullable:
            inner = inner[1]
        free = isinstance(inner, dict) and inner.get("logicalType") == "json"
        steps, pieces = _pieces(inner, var, names, put)
        if not nullable:
            required += 1
            code += [f"    {var} = value[{name}]", *(f"    {step}" for step in steps)]
            parts += pieces
            continue
        # p: the branch of ["null", T], and T's bytes; those of a text are in its variable. Null where a field may be
        # missing is not plain: it is kept apart.
        nothing = f"p{number} = b'\\0'"
        if inner == "string":
            nothing += f"; {var} = b''"
            steps.append(f"p{number} = P[len({var})]")
            parts += [f"p{number}", var]
        else:
            steps.append(f"p{number} = b'\\2' + {' + '.join(pieces)}")
            parts.append(f"p{number}")
        branches = [] if free else [(f"{var} is None", "no()" if optional else nothing)]
        if optional:
            conditional = True
            branches.insert(0, (f"{var} is M", nothing))
            code.append(f"    {var} = value.get({name}, M)")
            steps = ["found += 1", *steps]
        else:
            required += 1
            code.append(f"    {var} = value[{name}]")
        for place, (test, step) in enumerate(branches):
            code.append(f"    {'el' if place else ''}if {test}: {step}")
        if branches:
            code.append("    else:")
        code += [f"        {step}" if branches else f"    {step}" for step in steps]
    if conditional:
        code.insert(1, f"    found = {required}")
    code.append(f"    if len(value) != {'found' if conditional else required}: no()")
    code.append(f"    front += ({', '.join([*parts, empty])},)")
    code.append("    return join(front)")
    exec("\n".join(code), names)
    made: Write = names["write"]
    return made


def may_hold_floats(kind: Any) -> bool:
    """Whether a number written as an integer in the JSON could end up as a double or as JSON text."""
    match kind:
        case str():
            return kind not in _NEVER_FLOATS
        case list():
            return any(may_hold_floats(branch) for branch in kind if branch != "null")
        case {"logicalType": "timestamp-micros" | "decimal-text"} | {"type": "enum"}:
            return False
        case {"type": "array", "items": inner} | {"type": "map", "values": inner}:
            return may_hold_floats(inner)
        case {"type": "record"}:
            return any(may_hold_floats(field["type"]) for field in kind["fields"][:-1])
        case {"type": "string", **rest} if "logicalType" not in rest or rest["logicalType"] == "uuid":
            return False
    return True


def _pieces(kind: Any, var: str, names: dict[str, Any], put: Callable[[Any], Put]) -> tuple[list[str], list[str]]:
    """Steps to take before, and the expressions whose bytes are the value in `var`."""
    if kind == "string":
        # Nothing but text has .encode; a text as long as the table has no length in it.
        return [f"{var} = {var}.encode()"], [f"L[len({var})]", var]
    if kind == "boolean":
        return [], [f"(b'\\1' if {var} is True else b'\\0' if {var} is False else no())"]
    names[f"W{var}"] = _by(put(kind))
    if kind == "long":
        return [], [f"(L[{var}] if type({var}) is int and 0 <= {var} < {len(names['L'])} else W{var}({var}))"]
    if isinstance(kind, dict) and kind["type"] == "enum":
        names[f"E{var}"] = {
            symbol: _place(place) for place, symbol in enumerate(kind["symbols"]) if symbol != kind.get("default")
        }
        return [], [f"E{var}[{var}]"]
    return [], [f"W{var}({var})"]


def _place(place: int) -> bytes:
    """The place of a symbol as Avro writes it; enums are short."""
    if place >= 64:
        raise ValueError("an enum of more than 64 symbols")
    return bytes([place << 1])


def _by(put: Put) -> Callable[[Any], bytes]:
    def write(value: Any) -> bytes:
        out, extra = bytearray(), dict[str, str]()
        put(value, out, extra, "")
        if extra:
            _no()
        return bytes(out)

    return write


def _no() -> None:
    raise ValueError("not plain")
