"""What a row of an import means: a typed item for `record_contact_event_items`, or the reason why it is none. Pure.

What must stay true: whatever the row holds, the answer is an item that the table and the schema on the wire take, or
`Rejected` with words for the person who wrote the file. The words are kept, so they never repeat a phone, an e-mail or
an id: the file of rejected rows has those.

Fields, as columns of a CSV (all text) or keys of a JSON object:

    who       contact_id, phone, email, contact_external_id (an id at contact_source, else at source), name
    what      event_type, metric: one of the two; source, source_type; external_event_id (the fact's name at its source,
              `order_paid:1001`), unique_event_id, object_id, object_id_ref, entity_type, entity_id
    how much  value (with a point), currency (BRL when there is a value)
    when      occurred_at: ISO 8601; without an offset it is a time of the organization's time zone
    more      properties: a JSON object; in a CSV also one column each, `properties.productName`

Columns and keys that begin with _ are passed over: the file of rejected rows has them.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson

from producers.contact_events import MAX_LENGTHS, SOURCE_TYPES
from producers.ingest.normalize.facts import email_identity, phone_identity
from schemas.codec import check_properties
from schemas.contact_events import contact_event_type_of, unknown_type
from schemas.errors import EncodeError
from schemas.events.contact_event import PROPERTIES

# The fields of afluente.contact_event_item that a file can fill, in the order they are staged.
FIELDS: Final = (
    "n", "contact_id", "phone", "phone_as_received", "email", "contact_external_id", "contact_source", "name",
    "event_type", "metric_name", "source", "source_type", "external_event_id", "unique_event_id", "object_id",
    "object_id_ref", "entity_type", "entity_id", "value", "currency", "occurred_at", "properties", "integration_id",
)  # fmt: skip
ACCEPTED: Final = frozenset(FIELDS) - {"n", "phone_as_received", "metric_name"} | {"metric"}
PROPERTY_PREFIX: Final = "properties."

_TEXT_LENGTHS = {**MAX_LENGTHS, "metric": 100, "contact_external_id": 320, "contact_source": 100, "name": 255}
_TEXTS = tuple(_TEXT_LENGTHS.items())
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
_AMOUNT = re.compile(r"-?[0-9]{1,38}(\.[0-9]{1,38})?\Z")
_BEYOND = 10**38  # no amount has more digits, and an integer may have more than a float can be asked about
_CURRENCY = re.compile(r"[A-Z]{3}\Z")
_LONG_DIGITS = re.compile(rb"[0-9]{19}")
_UNFIT = re.compile("[\0\ud800-\udfff]")
_KNOWN_PEOPLE = 65_536
_YEARS = (1970, 2200)


class Rejected(Exception):
    """The row is not recorded; the reason is for the person who wrote the file."""

    @property
    def reason(self) -> str:
        return str(self)


class Judge:
    """Judges rows of one file. `name_of_row(line)` names a fact whose row gives it no name: the same file brings it
    once."""

    def __init__(
        self,
        *,
        source: str | None,
        timezone: ZoneInfo,
        country: str,
        name_of_row: Callable[[int], str],
    ) -> None:
        self._source = source
        self._timezone = timezone
        self._name_of_row = name_of_row

        @lru_cache(_KNOWN_PEOPLE)
        def phone(text: str) -> str | None:
            found = phone_identity(text, country)
            return None if found is None else found.value

        @lru_cache(_KNOWN_PEOPLE)
        def email(text: str) -> str | None:
            found = email_identity(text)
            return None if found is None else found.value

        self._phone, self._email = phone, email

    def item(self, n: int, line: int, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The row as values of FIELDS; `n` is what the database calls it by. Raises Rejected."""
        get = row.get
        if not row.keys() <= ACCEPTED:
            unknown = sorted(key for key in row.keys() - ACCEPTED if not key.startswith("_"))
            if unknown:
                raise Rejected(f"unknown field {unknown[0]!r}")
        for name, most in _TEXTS:
            if (text := get(name)) is not None and (type(text) is not str or not 0 < len(text) <= most):
                raise Rejected(_unfit_text(name, text, most))
        event_type, metric = get("event_type"), get("metric")
        if event_type is None and metric is None:
            raise Rejected("neither event_type nor metric")
        if (wrong := unknown_type(event_type)) is not None:
            raise Rejected(wrong)
        source = get("source") or self._source
        if source is None:
            raise Rejected("no source: give the column, or --source for all rows")
        if (source_type := get("source_type")) is not None and source_type not in SOURCE_TYPES:
            raise Rejected(f"source_type must be one of {', '.join(SOURCE_TYPES)}, not {source_type!r}")
        external_event_id = get("external_event_id")
        if external_event_id is None and get("unique_event_id") is None:
            external_event_id = self._name_of_row(line)
        phone_as_received = get("phone")
        phone = None if phone_as_received is None else self._known(self._phone, "phone", phone_as_received)
        email = None if (given := get("email")) is None else self._known(self._email, "email", given)
        contact_id, contact_external_id = _uuid("contact_id", get("contact_id")), get("contact_external_id")
        if contact_id is None and phone is None and email is None and contact_external_id is None:
            raise Rejected("names no contact: contact_id, phone, email or contact_external_id")
        value, currency = get("value"), get("currency")
        if currency is not None and (type(currency) is not str or _CURRENCY.match(currency) is None):
            raise Rejected(f"currency {currency!r} is not one such as BRL")
        return (
            n,
            contact_id,
            phone,
            None if phone_as_received == phone else phone_as_received,
            email,
            contact_external_id,
            get("contact_source"),
            get("name"),
            event_type,
            metric,
            source,
            source_type,
            external_event_id,
            get("unique_event_id"),
            get("object_id"),
            get("object_id_ref"),
            get("entity_type"),
            get("entity_id"),
            None if value is None else _amount(value),
            currency,
            None if (moment := get("occurred_at")) is None else self._moment(moment),
            _properties(
                event_type if event_type is not None else contact_event_type_of(metric or ""), get("properties")
            ),
            _uuid("integration_id", get("integration_id")),
        )

    def _known(self, canonical: Callable[[str], str | None], name: str, given: Any) -> str:
        if type(given) is int:  # phones of JSON files
            given = str(given)
        found = canonical(given) if type(given) is str and len(given) <= 320 else None
        if found is None:
            raise Rejected(f"{name} cannot be read as one")
        return found

    def _moment(self, given: Any) -> datetime:
        try:
            moment = datetime.fromisoformat(given)
        except (TypeError, ValueError):
            raise Rejected(
                f"occurred_at {str(given)[:60]!r} is not ISO 8601, such as 2026-11-20T10:00:00-03:00"
            ) from None
        if not _YEARS[0] <= moment.year <= _YEARS[1]:
            raise Rejected(f"occurred_at {given[:60]!r} does not lie between {_YEARS[0]} and {_YEARS[1]}")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=self._timezone)
        return moment


def columns(header: Sequence[str]) -> list[str]:
    """The header of a CSV as the fields its columns fill, '' for those passed over. Raises Rejected."""
    found = []
    for name in (title.strip() for title in header):
        if not name or name.startswith("_"):
            found.append("")
        elif name in ACCEPTED or (name.startswith(PROPERTY_PREFIX) and len(name) > len(PROPERTY_PREFIX)):
            found.append(name)
        else:
            raise Rejected(f"unknown column {name!r}; columns are {', '.join(sorted(ACCEPTED))} and properties.NAME")
    twice = [name for name, times in Counter(found).items() if name and times > 1]
    if twice:
        raise Rejected(f"column {min(twice)!r} is there twice")
    return found


def row_of(fields: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    """The cells of a CSV row by field; empty ones are left out. Raises Rejected."""
    if len(cells) != len(fields):
        raise Rejected(f"has {len(cells)} cells, the header {len(fields)}")
    row: dict[str, Any] = {name: cell for name, cell in zip(fields, cells, strict=True) if cell and name}
    if (text := row.get("properties")) is not None:
        try:
            row["properties"] = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Rejected(f"properties are not JSON: {error}") from None
    single = [name for name in row if name.startswith(PROPERTY_PREFIX)]
    if single:
        kinds = _conversions(row.get("event_type") or contact_event_type_of(row.get("metric") or ""))
        properties = row.setdefault("properties", {})
        if not isinstance(properties, dict):
            raise Rejected("properties must be a JSON object")
        for name in single:
            key = name.removeprefix(PROPERTY_PREFIX)
            cell = row.pop(name)
            try:
                properties[key] = kinds[key](cell) if key in kinds else cell
            except ValueError:
                raise Rejected(f"{name} {cell[:60]!r} is not of its type") from None
    return row


def parsed(line: bytes) -> dict[str, Any]:
    """The object of a line of NDJSON; null and empty text are left out. Raises Rejected."""
    try:
        # orjson makes floats of integers beyond 64 bits.
        row = json.loads(line, parse_constant=_no_number) if _LONG_DIGITS.search(line) else orjson.loads(line)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"not JSON: {error}") from None
    if type(row) is not dict:
        raise Rejected("not a JSON object")
    if b"\\u0000" in line and _holds_nul(row):
        raise Rejected("contains NUL (U+0000), which Postgres cannot keep")
    return {key: value for key, value in row.items() if value is not None and value != ""}


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_holds_nul(key) or _holds_nul(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_holds_nul, value))


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _unfit_text(name: str, text: Any, most: int) -> str:
    if not isinstance(text, str):
        return f"{name} must be text, not {type(text).__name__}"
    return f"{name} has {len(text)} characters; 1 to {most} fit"


def _uuid(name: str, given: Any) -> str | None:
    if given is None:
        return None
    if type(given) is str:
        if _UUID.match(given):
            return given
        try:
            return str(UUID(given))
        except ValueError:
            pass
    raise Rejected(f"{name} is not a UUID")


def _amount(given: Any) -> str:
    if type(given) is str:
        if _AMOUNT.match(given):
            return given
    elif (type(given) is int and abs(given) < _BEYOND) or (type(given) is float and math.isfinite(given)):
        text = format(Decimal(repr(given)), "f")
        if _AMOUNT.match(text):
            return text
    raise Rejected(f"value {str(given)[:60]!r} is not an amount such as 297.90")


def _properties(event_type: str | None, given: Any) -> str | None:
    """Properties as JSON text, if the record of this type can carry them."""
    if given is None or given == {}:
        return None
    if type(given) is not dict:
        raise Rejected("properties must be a JSON object")
    try:
        check_properties(event_type, given)
        text = _dumped(given)
    except EncodeError as error:
        raise Rejected(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Rejected(f"properties cannot be kept: {error}") from None
    return text


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers beyond 64 bits; lone surrogates, which json lets pass
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text


def unfit(text: str) -> str | None:
    """Why a line cannot be kept as text, None if it can."""
    if (found := _UNFIT.search(text)) is None:
        return None
    return "contains NUL (U+0000), which Postgres cannot keep" if found[0] == "\0" else "is not UTF-8"


@lru_cache
def _conversions(event_type: str | None) -> Mapping[str, Callable[[str], Any]]:
    """How the cells of typed properties are read where text is not what they are."""
    model = PROPERTIES.get(event_type or "")
    found: dict[str, Callable[[str], Any]] = {}
    for name, field in model.model_fields.items() if model else ():
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        if float in kinds:
            found[name] = _finite
        elif int in kinds:
            found[name] = int
        elif any(typing.get_origin(kind) is list for kind in kinds):
            found[name] = orjson.loads
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
