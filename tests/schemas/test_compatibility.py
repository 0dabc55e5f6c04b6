"""Changes to a published schema, each judged as it should be."""

import copy

import pytest

from schemas.compatibility import breaking_changes

BASE: dict = {
    "type": "record",
    "name": "Paid",
    "namespace": "afluente.order.v1",
    "fields": [
        {"name": "order_id", "type": "string"},
        {"name": "amount_cents", "type": "long"},
        {"name": "quantity", "type": "int"},
        {"name": "paid_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 4}},
        {"name": "reason", "type": ["null", "string"], "default": None},
        {"name": "payer", "type": ["null", "string"]},
        {
            "name": "method",
            "type": {"type": "enum", "name": "Method", "symbols": ["pix", "card", "unknown"], "default": "unknown"},
        },
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["open", "closed"]}},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {"type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]},
            },
        },
        {"name": "gift", "type": ["null", "Item"], "default": None},
        {"name": "digest", "type": {"type": "fixed", "name": "Digest", "size": 16}},
        {"name": "extra", "type": {"type": "map", "values": "string"}, "default": {}},
    ],
}


def changed(change):
    schema = copy.deepcopy(BASE)
    fields = {field["name"]: field for field in schema["fields"]}
    change(schema, fields)
    return schema


def remove(name):
    return lambda schema, fields: schema["fields"].remove(fields[name])


def add(field):
    return lambda schema, fields: schema["fields"].append(field)


def retype(name, kind):
    return lambda schema, fields: fields[name].update(type=kind)


def update(name, **properties):
    return lambda schema, fields: fields[name]["type"].update(properties)


def rename(schema, fields):
    fields["reason"].update(name="cause", aliases=["reason"])


def require(schema, fields):
    fields["reason"].pop("default")


MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
OPTIONAL = {"name": "note", "type": ["null", "string"], "default": None}

BREAKING = {
    "a required field is added": add({"name": "store", "type": "string"}),
    "a required field is removed": remove("order_id"),
    "a field's type is changed": retype("amount_cents", "string"),
    "a number is widened": retype("quantity", "long"),
    "text becomes bytes": retype("order_id", "bytes"),
    "microseconds become milliseconds": retype("paid_at", MILLIS),
    "a number becomes a moment": retype("amount_cents", MILLIS),
    "a decimal's scale is changed": update("price", scale=2),
    "a decimal's precision is changed": update("price", precision=10),
    "a nullable field must not be null any more": retype("payer", "string"),
    "a field may be null that could not": retype("order_id", ["null", "string"]),
    "an optional field becomes required": require,
    "a field is renamed, with an alias": rename,
    "an enum symbol is added without a default": update("status", symbols=["open", "closed", "held"]),
    "an enum symbol is removed": update("method", symbols=["pix", "unknown"]),
    "an enum's default is changed": update("method", default="pix"),
    "the namespace is changed": lambda schema, fields: schema.update(namespace="afluente.orders.v1"),
    "the record is renamed": lambda schema, fields: schema.update(name="WasPaid"),
    "a nested record is renamed": lambda schema, fields: (
        fields["items"]["type"]["items"].update(name="Line"),
        fields["gift"].update(type=["null", "Line"]),
    ),
    "a nested record's field is retyped": lambda schema, fields: fields["items"]["type"]["items"]["fields"][0].update(
        type="long"
    ),
    "a list becomes a map": lambda schema, fields: fields["items"].update(
        type={"type": "map", "values": fields["items"]["type"]["items"]}
    ),
    "a map's values are retyped": update("extra", values="long"),
    "a fixed gets another size": update("digest", size=20),
    "a union gets another branch": retype("reason", ["null", "string", "long"]),
}

COMPATIBLE = {
    "nothing": lambda schema, fields: None,
    "an optional field is added": add(OPTIONAL),
    "an optional field is removed": remove("reason"),
    "an enum symbol is added beside a default": update("method", symbols=["pix", "card", "boleto", "unknown"]),
    "documentation is changed": lambda schema, fields: schema.update(doc="An order was paid."),
    "fields change places": lambda schema, fields: (
        schema["fields"].reverse()
        or fields["gift"].update(type=["null", fields["items"]["type"]["items"]])
        or fields["items"].update(type={"type": "array", "items": "Item"})
    ),
    "symbols change places": update("method", symbols=["unknown", "card", "pix"]),
    "an optional field is added to a nested record": lambda schema, fields: fields["items"]["type"]["items"][
        "fields"
    ].append(OPTIONAL),
    "an optional record is added": add(
        {
            "name": "shipping",
            "type": ["null", {"type": "record", "name": "Shipping", "fields": [OPTIONAL]}],
            "default": None,
        }
    ),
    "a required field gets a default": lambda schema, fields: fields["payer"].update(default=None),
    "an optional map is added": add({"name": "labels", "type": {"type": "map", "values": "string"}, "default": {}}),
    "a name is written in full": lambda schema, fields: fields["gift"].update(type=["null", "afluente.order.v1.Item"]),
}


@pytest.mark.parametrize("change", BREAKING.values(), ids=BREAKING)
def test_breaking_change_is_found(change):
    assert breaking_changes(BASE, changed(change))


@pytest.mark.parametrize("change", COMPATIBLE.values(), ids=COMPATIBLE)
def test_compatible_change_passes(change):
    assert breaking_changes(BASE, changed(change)) == []


def test_problem_names_its_place():
    problems = breaking_changes(BASE, changed(update("price", scale=2)))
    assert problems == ["price: its scale changed from 4 to 2 on the same bytes"]
    problems = breaking_changes(BASE, changed(require))
    assert problems == ["reason: could be missing and is required now: emitters that leave it out would be refused"]
