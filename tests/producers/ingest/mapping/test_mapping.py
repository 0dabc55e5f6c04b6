"""A mapping is checked whole: every mistake is named by its field, in words for whoever wrote it."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.ingest import mapping
from producers.ingest.mapping import reference

MINIMAL: dict[str, Any] = {
    "source": "our_shop",
    "verify": {"by": "hmac", "header": "X-Signature"},
    "topic": "event",
    "person": {"email": "buyer.email"},
    "rules": [{"name": "paid", "facts": [{"fact": "order_paid", "id": "id", "event_type": "purchase_completed"}]}],
}


def changed(*steps, to):
    """MINIMAL with something else in one place; a last step that is missing is made."""
    given = copy.deepcopy(MINIMAL)
    place: Any = given
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = to
    return given


FACT = ("rules", 0, "facts", 0)


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (changed("source", to="shopify"), "source", "belongs to a sender"),
        (changed("source", to="Our Shop"), "source", "pattern"),
        (changed("sorce", to="x"), "sorce", "no such field"),
        ({"source": "x"}, "rules", "is required"),
        (changed("rules", to=[]), "rules", "is empty"),
        (changed("topic", to="a..b"), "topic.path", "a key is missing at character 3"),
        (changed("topic", to={}), "topic", "exactly one of path, header, const, first, join"),
        (changed("topic", to={"path": "a", "const": "b"}), "topic", "exactly one of"),
        (changed("topic", to={"header": "Authorization"}), "topic.header", "may hold a secret"),
        (changed("verify", "algorithm", to="md5"), "verify.algorithm", "sha1"),
        (changed("verify", "by", to="nothing"), "verify", "hmac or token"),
        (changed("verify", "signed", to="{timestamp}.{body}"), "verify.signed", "needs timestamp.header"),
        (changed("verify", "signed", to="{body}.{body}"), "verify.signed", "{body} once"),
        (changed("verify", "header", to="X Signature"), "verify.header", "pattern"),
        (changed(*FACT, "metric", to="Order Placed"), "rules[0].facts[0].metric", "'Order Paid'"),
        (changed(*FACT, "metric", to="__webhook__"), "rules[0].facts[0].metric", "a trigger's"),
        (changed(*FACT, "event_type", to="bought"), "rules[0].facts[0].event_type", "purchase_completed"),
        (changed(*FACT, "at", to={"path": "at", "form": "local"}), "rules[0].facts[0].at.zone", "needs one"),
        (
            changed(*FACT, "at", to={"path": "at", "form": "local", "zone": "Rio"}),
            "rules[0].facts[0].at.zone",
            "no time",
        ),
        (changed(*FACT, "id", to="@.id"), "rules[0].facts[0].id", "this mapping has none"),
        (changed(*FACT, "value", to={"path": "x", "unit": "cents"}), "rules[0].facts[0].value.unit", "minor"),
        (changed(*FACT, "when", to=[{"path": "x"}]), "rules[0].facts[0].when[0]", "exactly one of equals"),
        (changed(*FACT, "fact", to="Paid!"), "rules[0].facts[0].fact", "pattern"),
        (changed("rules", 0, "topics", to=["a*b"]), "rules[0].topics", "at the end only"),
        (changed("rules", 0, "ignore", to=True), "rules[0].ignore", "has no facts"),
        (changed("person", to={"name": "buyer.name"}), "person", "at least one of"),
        (changed("description", to="x" * 70_000), "(all)", "at most 65536"),
    ],
)
def test_wrong_field_is_named(given, field, says):
    with pytest.raises(mapping.MappingRefused) as refused:
        mapping.read(given)
    problems = dict(refused.value.problems)
    assert field in problems, problems
    assert says in problems[field]


def test_list_whose_items_are_all_wrong_is_not_called_empty_too():
    with pytest.raises(mapping.MappingRefused) as refused:
        mapping.read(changed(*FACT, "event_type", to="bought"))
    assert [field for field, _ in refused.value.problems] == ["rules[0].facts[0].event_type"]


def test_header_of_the_token_is_not_read_as_data_nor_kept():
    given = changed("verify", to={"by": "token", "header": "X-Token", "scheme": ""})
    assert mapping.read(given).kept_headers() == frozenset()
    with pytest.raises(mapping.MappingRefused, match=r"verify\.header"):
        mapping.read(given | {"topic": {"header": "X-Token"}})


def test_token_cannot_stand_in_a_header_that_is_always_kept():
    given = changed("verify", to={"by": "token", "header": "X-Request-Id", "scheme": ""})
    with pytest.raises(mapping.MappingRefused, match="kept and logged"):
        mapping.read(given)


def test_headers_that_are_read_are_kept():
    given = changed("topic", to={"first": [{"header": "X-Topic"}, "event"]})
    given["verify"]["timestamp"] = {"header": "X-Time"}
    assert mapping.read(given).kept_headers() == {"x-topic", "x-signature", "x-time"}


def test_alternatives_stand_only_so_deep_in_each_other():
    deep: Any = "a"
    for _ in range(4):
        deep = {"first": [deep]}
    with pytest.raises(mapping.MappingRefused, match="deep in each other"):
        mapping.read(MINIMAL | {"topic": deep})


@pytest.mark.parametrize("name", mapping.examples())
def test_shipped_mapping_is_right_and_has_samples(name):
    given = mapping.read(mapping.example(name))
    assert given.source == name
    assert mapping.samples(name)


def test_bad_mapping_in_settings_is_none_and_never_raises():
    for kept in ({}, {"mapping": None}, {"mapping": []}, {"mapping": {}}, {"mapping": changed("topic", to=1)}):
        assert mapping.kept(kept) is None
    assert mapping.kept({"mapping": MINIMAL}).source == "our_shop"


def test_reference_names_every_field_once():
    fields = [row["field"] for row in reference.fields()]
    assert len(fields) == len(set(fields))
    assert {"source", "verify(hmac).header", "rules[].facts[].metric", "rules[].order.lines.sku"} <= set(fields)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60)
@given(st.data())
def test_no_mapping_makes_the_check_fail(data):
    """Junk in any place of a right one: refused by name, or taken."""
    given = json.loads(json.dumps(mapping.example("courier")))
    place: object = given
    for _ in range(data.draw(st.integers(1, 6))):
        steps = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not steps:
            break
        step = data.draw(st.sampled_from(steps))
        if data.draw(st.booleans()):
            place[step] = data.draw(_json)  # type: ignore[index]
            break
        place = place[step]  # type: ignore[index]
    problems = []
    try:
        mapping.read(given)
    except mapping.MappingRefused as refused:
        problems = refused.problems
    assert all(field and what for field, what in problems)
