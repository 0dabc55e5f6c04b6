"""Reading a JSON body of unknown make: exact numbers, text that Postgres can hold, and fields that may be anything.

`Document` wraps one object. Its methods return None for what is absent, null or of another type; those called
`need_...` raise `Malformed` with the field's path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any, NoReturn

import msgspec

from producers.ingest.sources import is_too_wide

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LEAST, _CONTEXT = Decimal("1e-20"), Context(prec=60)
_DECIMAL = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?\Z")


class Malformed(Exception):
    """A field that the mapping needs is not there, or is not what it must be. `path` names it; values are not kept."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(path)


class Document:
    """One JSON object and where it stood in the body."""

    __slots__ = ("path", "value")

    def __init__(self, value: dict[str, Any], path: str = "") -> None:
        self.value = value
        self.path = path

    def __contains__(self, name: str) -> bool:
        return name in self.value

    def raw(self, name: str) -> Any:
        return self.value.get(name)

    def text(self, *names: str) -> str | None:
        """The first of these fields that is text with something in it."""
        for name in names:
            value = self.value.get(name)
            if isinstance(value, str) and value.strip():
                return value
        return None

    def need_text(self, name: str) -> str:
        return self.text(name) or self._malformed(name)

    def identifier(self, name: str) -> str | None:
        """An id, whether it came as a number or as text."""
        value = self.value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | str):
            return None
        return str(value).strip()[:200] or None

    def need_identifier(self, name: str) -> str:
        return self.identifier(name) or self._malformed(name)

    def integer(self, name: str) -> int | None:
        """A whole number that a double holds: a count, an amount in minor units. Ids are longer: `identifier`."""
        value = self.value.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53 else None

    def decimal(self, name: str) -> Decimal | None:
        """A number or a decimal text, exactly as written, to 20 decimals. Plain decimals only: no NaN, no 1e999."""
        value = self.value.get(name)
        if isinstance(value, bool):
            return None
        if isinstance(value, int | Decimal):
            number = Decimal(value)
        elif isinstance(value, str) and _DECIMAL.match(value.strip()):
            number = Decimal(value.strip())
        else:
            return None
        if not number.is_finite() or not -15 < number.adjusted() < 15:
            return None
        # A double written out whole has fifty decimals, a hostile number a million.
        return _CONTEXT.quantize(number, _LEAST) if len(number.as_tuple().digits) > 40 else number

    def flag(self, name: str) -> bool:
        """Whether the field is there and true."""
        return self.value.get(name) is True

    def child(self, name: str) -> Document:
        """The object in this field; an empty one if there is none."""
        value = self.value.get(name)
        return Document(value if isinstance(value, dict) else {}, self._at(name))

    def need_child(self, name: str) -> Document:
        if not isinstance(self.value.get(name), dict):
            self._malformed(name)
        return self.child(name)

    def children(self, name: str) -> Iterator[Document]:
        """The objects of the list in this field; anything else in it is passed over."""
        value = self.value.get(name)
        for place, item in enumerate(value if isinstance(value, list) else []):
            if isinstance(item, dict):
                yield Document(item, f"{self._at(name)}[{place}]")

    def texts(self, name: str) -> list[str]:
        """The texts of the list in this field."""
        value = self.value.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def _at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _malformed(self, name: str) -> NoReturn:
        raise Malformed(self._at(name))


def read_document(body: bytes) -> Document | None:
    """The body as a JSON object; None for anything else, or one of too many parts (`is_too_wide`). Decimals are exact,
    integers of any size are whole.

    NUL and lone surrogates, which no Postgres text holds, become U+FFFD.
    """
    if is_too_wide(body):
        return None
    try:
        value = _exact.decode(body)
        if b"\\u0000" in body:
            value = _clean(value)
    except (ValueError, ArithmeticError, RecursionError):
        value = _read_leniently(body)
    return Document(value) if isinstance(value, dict) else None


_exact = msgspec.json.Decoder(float_hook=Decimal)


def _read_leniently(body: bytes) -> Any:
    """What the strict reader refuses: UTF-16, half a surrogate pair, a number beyond all bounds; None for no JSON."""
    try:
        return _clean(json.loads(body, parse_float=_decimal, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _decimal(text: str) -> Decimal | None:
    """None for an exponent that no Decimal holds: such a number is as good as absent."""
    try:
        return Decimal(text)
    except ArithmeticError:
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", REPLACEMENT).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_clean(name): _clean(item) for name, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
