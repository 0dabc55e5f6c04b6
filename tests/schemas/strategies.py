"""Hypothesis strategies for JSON, and for payloads of every event type as its committed schema has them."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import strategies as st

from schemas import published

# What jsonb can hold: no NUL, no lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = st.one_of(
    st.integers(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False, width=64)
)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
JSON_OBJECTS = st.dictionaries(TEXT, JSON_VALUES, max_size=5)

_OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31), timezones=st.one_of(st.just(UTC), _OFFSETS)).flatmap(
    lambda moment: st.sampled_from(
        [moment.isoformat(), moment.isoformat(timespec="microseconds"), moment.isoformat(timespec="milliseconds")]
    )
)
AMOUNTS = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**18), max_value=10**18, places=4).map(
        lambda amount: format(amount, "f")
    ),
    st.integers(-(2**80), 2**80),
    st.floats(-1e15, 1e15).filter(lambda amount: amount == 0 or abs(amount) > 1e-9),
)


def of_type(kind, named):
    """Values that an Avro type of a committed schema takes, as JSON."""
    match kind:
        case str() if kind in named:
            return of_record(named[kind], named)
        case "string":
            return TEXT
        case "boolean":
            return st.booleans()
        case "long":
            return st.integers(-(2**63), 2**63 - 1)
        case "double":
            return st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
        case {"logicalType": "timestamp-micros"}:
            return MOMENTS
        case {"logicalType": "decimal-text"}:
            return AMOUNTS
        case {"logicalType": "json"}:
            return JSON_VALUES
        case {"type": "array", "items": items}:
            return st.lists(of_type(items, named), max_size=3)
        case {"type": "map", "values": values}:
            return st.dictionaries(TEXT, of_type(values, named), max_size=3)
        case {"type": "enum"}:
            return st.sampled_from([symbol for symbol in kind["symbols"] if symbol != kind["default"]])
        case {"type": "record"}:
            named[kind["name"]] = kind
            return of_record(kind, named)
    raise AssertionError(kind)


def of_record(kind, named):
    required: dict = {}
    optional: dict = {}
    for field in kind["fields"]:
        if field["name"] == "extra":
            continue
        inner = field["type"]
        values = of_type(inner[1], named) if isinstance(inner, list) else of_type(inner, named)
        if isinstance(inner, list):
            values = st.one_of(st.none(), values)
        (optional if "default" in field else required)[field["name"]] = values
    declared = st.fixed_dictionaries(required, optional=optional)
    names = {*required, *optional}
    unknown = st.dictionaries(TEXT.filter(lambda name: name not in names), JSON_VALUES, max_size=2)
    return st.tuples(declared, unknown).map(lambda both: {**both[1], **both[0]})


@st.composite
def catalogue_payloads(draw):
    """(event type, payload, metadata) of any published schema, unknown fields included."""
    entry = draw(st.sampled_from([p for p in published.all_published() if p.event_type != published.CUSTOM]))
    payload_type = next(f["type"] for f in entry.schema()["fields"] if f["name"] == "payload")
    payload = draw(of_type(payload_type, {}))
    if entry.event_type == published.CONTACT_EVENT:
        payload["contact_event_type"] = entry.variant or None
    return entry.event_type, payload, {"schema_version": entry.version, "k": draw(JSON_VALUES)}
