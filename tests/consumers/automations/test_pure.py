"""Conditions, texts, times and the guard: what needs no server."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.automations import conditions, guard, text, times
from consumers.automations.definition import read
from consumers.automations.errors import BadDefinition
from schemas.contact_events import TRIGGER_TO_METRIC

SAO_PAULO, LISBON = ZoneInfo("America/Sao_Paulo"), ZoneInfo("Europe/Lisbon")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc") | st.text(max_size=5), inner),
    max_leaves=15,
)
paths = st.lists(st.sampled_from(["a", "b", "c", "0", "1"]), min_size=1, max_size=4).map(
    lambda names: ".".join(["a", *names[1:]])
)


@st.composite
def questions(draw):
    op = draw(st.sampled_from(conditions.OPERATORS))
    match op:
        case "exists":
            value = draw(st.booleans())
        case "in" | "not_in":
            value = draw(st.lists(json_values, min_size=1, max_size=3))
        case "gt" | "gte" | "lt" | "lte":
            value = draw(st.integers(-5, 5) | st.just("2026-01-01T00:00:00+00:00") | st.just("1.50"))
        case "starts_with" | "ends_with":
            value = draw(st.text(max_size=3))
        case _:
            value = draw(json_values.filter(lambda value: value is not None))
    return {"field": draw(paths), "op": op, "value": value}


raw_conditions = st.recursive(
    questions(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"all": parts})
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"any": parts})
        | inner.map(lambda part: {"not": part})
    ),
    max_leaves=6,
)


@settings(max_examples=50)
@given(raw_conditions, json_values)
def test_judging_never_fails_and_what_is_shown_is_what_holds(raw, facts):
    condition = conditions.parse(raw)
    held = conditions.holds(condition, facts)
    judged = conditions.judge(condition, facts)
    assert judged.holds is held
    assert conditions.holds(conditions.parse({"not": raw}), facts) is not held
    both = conditions.parse({"all": [raw, raw]})
    assert conditions.holds(both, facts) is held
    # De Morgan
    other = conditions.parse({"not": {"any": [{"not": raw}, {"not": raw}]}})
    assert conditions.holds(other, facts) is held


@settings(max_examples=40)
@given(questions())
def test_an_unknown_field_makes_every_test_false_but_that_it_is_not_there(test):
    condition = conditions.parse(test)
    for facts in ({}, {"a": None}, {"b": 1}):
        assert conditions.holds(condition, facts) is (test["op"] == "exists" and test["value"] is False)


@settings(max_examples=50)
@given(
    st.one_of(json_values, st.dictionaries(st.sampled_from(["all", "any", "not", "field", "op", "value"]), json_values))
)
def test_what_is_no_condition_is_refused_with_words(raw):
    try:
        conditions.parse(raw)
    except conditions.BadCondition as error:
        assert str(error)  # noqa: PT017  # any other error is the failure


@pytest.mark.parametrize(
    ("field", "op", "value", "holds"),
    [
        ("event.value", "gte", 297.9, True),  # text of digits is a number
        ("event.value", "eq", "297.90", True),
        ("event.value", "eq", 297.90, True),
        ("event.value", "gt", "300", False),
        ("event.value", "gt", "2026-01-01T00:00:00+00:00", False),
        ("event.occurred_at", "lt", "2026-11-30T01:00:00-03:00", True),
        ("event.big", "eq", 9007199254740993, True),
        ("event.big", "eq", 9007199254740992, False),
        ("event.paid", "eq", True, True),
        ("event.paid", "eq", 1, False),  # true is no number
        ("contact.tags", "contains", "vip", True),
        ("contact.tags", "not_contains", "novo", True),
        ("message.text", "contains", "PREÇO", True),
        ("message.text", "starts_with", "qual", True),
        ("event.items.sku", "eq", "B", True),  # any of them
        ("event.items.0.sku", "eq", "B", False),
        ("event.items.sku", "ne", "B", False),
        ("event.items.sku", "in", ["X", "A"], True),
        ("event.currency", "not_in", ["USD"], True),
        ("event.nothing", "not_in", ["USD"], False),
        ("event.nothing", "exists", False, True),
        ("contact.email", "exists", True, False),
    ],
)
def test_the_operators(field, op, value, holds):
    facts = {
        "event": {
            "value": "297.90",
            "occurred_at": "2026-11-30T03:59:00+00:00",
            "big": 9007199254740993,
            "paid": True,
            "items": [{"sku": "A"}, {"sku": "B"}],
            "currency": "BRL",
        },
        "contact": {"tags": ["vip", "sp"], "email": None},
        "message": {"text": "Qual o preço?"},
    }
    assert conditions.holds(conditions.parse({"field": field, "op": op, "value": value}), facts) is holds


def test_texts_are_filled_once_and_unknown_fields_leave_their_words():
    facts = {"contact": {"name": "{{ contact.secret }}", "secret": "x", "tags": ["a", "b"]}, "n": Decimal("1.50")}
    filled = text.fill(
        "{{contact.name}}|{{ contact.nick | amiga }}|{{ contact.tags }}|{{ n }}|{{ link: https://a.example/x?y=1 }}",
        facts,
        lambda url: f"<{url}>",
    )
    assert filled == "{{ contact.secret }}|amiga|a, b|1.50|<https://a.example/x?y=1>"


def test_what_is_filled_in_is_bounded_however_often_it_stands_there():
    facts = {"a": "x" * 200_000}
    filled = text.fill("{{ a }}" * 100 + "{{ link: https://a.example/ }}!", facts, lambda url: f"<{url}>")
    assert filled == "x" * text.MAX_FILLED + "<https://a.example/>!"
    data = text.fill_all({"a": ["{{ a }}"] * 3, "b": 1}, facts)
    assert [len(each) for each in data["a"]] == [text.MAX_FILLED, 0, 0]


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/",
        "javascript:alert(1)",
        "//a.example",
        "https://a.example@b.example/",
        "https://user:pw@a.example/",
        "https://a.example/\r\nSet-Cookie: x=1",
        "https://a.example/ x",
        "https://a.example\\@b.example/",
        'https://a.example/"onclick',
        "https://é.example/",
        "https:///x",
        "https://a.example/" + "x" * 2048,
    ],
)
def test_a_link_leads_to_a_plain_https_address_only(url):
    assert not text.is_link(url)
    with pytest.raises(text.BadText):
        text.parse("{{ link: " + url + " }}")


def test_spans_and_local_times():
    assert times.span("1d12h") == timedelta(days=1, hours=12)
    for bad in ("", "2", "h", "0s", "400d", "-1h", "1h30"):
        with pytest.raises(times.BadTime):
            times.span(bad)
    now = datetime(2026, 11, 30, 13, 0, tzinfo=UTC)  # 10:00 in Sao Paulo
    assert times.until("09:00", now, SAO_PAULO) == datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
    assert times.until("10:01", now, SAO_PAULO) == datetime(2026, 11, 30, 13, 1, tzinfo=UTC)
    assert times.until("2026-12-24T09:00", now, SAO_PAULO) == datetime(2026, 12, 24, 12, 0, tzinfo=UTC)
    assert times.until("2026-12-24T09:00+01:00", now, SAO_PAULO) == datetime(2026, 12, 24, 8, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "after", "zone", "expected"),
    [
        ("0 9 * * mon-fri", "2026-11-27T12:00:00+00:00", SAO_PAULO, "2026-11-30T12:00:00+00:00"),  # over a weekend
        ("*/15 * * * *", "2026-11-30T12:07:30+00:00", SAO_PAULO, "2026-11-30T12:15:00+00:00"),
        ("0 0 29 2 *", "2026-11-30T00:00:00+00:00", SAO_PAULO, "2028-02-29T03:00:00+00:00"),
        ("0 0 1,15 * sun", "2026-11-30T12:00:00+00:00", SAO_PAULO, "2026-12-01T03:00:00+00:00"),  # either day
        ("@daily", "2026-11-30T03:00:00+00:00", SAO_PAULO, "2026-12-01T03:00:00+00:00"),  # not itself again
        ("30 1 * * *", "2026-03-28T12:00:00+00:00", LISBON, "2026-03-29T01:30:00+00:00"),  # left out: by the old clocks
        ("30 1 * * *", "2026-10-24T12:00:00+00:00", LISBON, "2026-10-25T00:30:00+00:00"),  # comes twice: the first
        ("30 1 * * *", "2026-10-25T00:30:00+00:00", LISBON, "2026-10-26T01:30:00+00:00"),
    ],
)
def test_the_next_time_of_a_schedule(expression, after, zone, expected):
    found = times.Cron.parse(expression).after(datetime.fromisoformat(after), zone)
    assert found == datetime.fromisoformat(expected)


@settings(max_examples=25)
@given(
    st.sampled_from(["* * * * *", "*/7 3,15 * * *", "0 9 * * 1-5", "30 2 1-7 * *", "59 23 * * 0"]),
    st.datetimes(datetime(2015, 1, 1), datetime(2030, 1, 1)),
    st.sampled_from([SAO_PAULO, LISBON, ZoneInfo("UTC"), ZoneInfo("Australia/Lord_Howe")]),
)
def test_times_of_a_schedule_are_its_own_and_go_forward(expression, after, zone):
    cron = times.Cron.parse(expression)
    moment = after.replace(tzinfo=UTC)
    for _ in range(3):
        later = cron.after(moment, zone)
        assert later > moment
        local = later.astimezone(zone)
        gap = (
            local.replace(tzinfo=zone, fold=0).utcoffset()
            != (local - timedelta(hours=3)).replace(tzinfo=zone).utcoffset()
        )
        assert gap or (local.minute in cron.minutes and local.hour in cron.hours)
        moment = later


@pytest.mark.parametrize(
    "bad",
    ["", "* * * *", "60 * * * *", "* * * 13 *", "a * * * *", "*/0 * * * *", "5-1 * * * *", "* * 0 * *", "*," * 900],
)
def test_what_is_no_schedule_is_refused(bad):
    with pytest.raises(times.BadTime):
        times.Cron.parse(bad)


@pytest.mark.parametrize("zone", [SAO_PAULO, ZoneInfo("Asia/Tokyo")])
@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59"])
def test_a_time_at_the_end_of_the_calendar_is_refused(text, zone):
    with pytest.raises(times.BadTime):
        times.until(text, datetime(2026, 1, 1, tzinfo=UTC), zone)


def test_a_schedule_that_never_comes_is_none():
    assert times.Cron.parse("0 0 30 2 *").after(datetime(2026, 1, 1, tzinfo=UTC), SAO_PAULO) is None


def test_the_guard():
    now = datetime(2026, 11, 30, tzinfo=UTC)
    assert guard.stopped(0, [], now) is None
    assert guard.stopped(7, [], now) is None
    assert guard.stopped(8, [], now) == guard.TOO_DEEP
    assert guard.stopped(2, [now - timedelta(minutes=59)], now) == guard.CAME_BACK
    assert guard.stopped(2, [now - timedelta(minutes=60)], now) is None


def definition(**over):
    return {"name": "n", "trigger": {"type": "order_paid"}, "steps": [{"type": "add_tag", "tag": "vip"}]} | over


def test_every_trigger_type_of_the_seed_is_one():
    for name, metric in TRIGGER_TO_METRIC.items():
        more = {"schedule": {"cron": "@daily", "audience": "contacts"}, "webhook": {"source": "generic"}}
        trigger = {"type": name} | more.get(name, {})
        assert read(definition(trigger=trigger)).keys == (metric, None)


@pytest.mark.parametrize(
    ("over", "place", "word"),
    [
        ({"trigger": {"type": "nope"}}, "trigger", "nope"),
        ({"trigger": {"type": "metric", "metric": "__webhook__"}}, "trigger", "webhook"),
        ({"trigger": {"type": "webhook", "topic": "paid"}}, "trigger", "a channel or a source"),
        ({"trigger": {"type": "schedule", "cron": "61 * * * *"}}, "trigger.cron", "minute"),
        ({"trigger": {"type": "schedule", "cron": "@daily"}}, "", "audience"),
        ({"trigger": {"type": "schedule", "cron": "@daily", "timezone": "Mars"}}, "trigger.timezone", "Mars"),
        ({"conditions": {"all": [{"field": "event.value", "op": "gt", "value": "x"}]}}, "conditions", "all[0]"),
        ({"steps": []}, "steps", "1"),
        ({"steps": [{"type": "wait"}]}, "steps[0]", "'for' or 'until'"),
        ({"steps": [{"type": "wait", "for": "soon"}]}, "steps[0].for", "span"),
        ({"steps": [{"type": "send_message", "body": "{{ nope"}]}, "steps[0].body", "closed"),
        ({"steps": [{"type": "send_message", "text": "x"}]}, "steps[0].text", "not known"),
        ({"steps": [{"type": "call_webhook", "url": "ftp://x"}]}, "steps[0]", "https://"),
        ({"steps": [{"type": "call_webhook", "url": "https://x", "headers": {"Host": "y"}}]}, "steps[0]", "ours"),
        (
            {"steps": [{"type": "call_webhook", "url": "https://x", "headers": {"A": "b\r\nC: d"}}]},
            "steps[0]",
            "one line",
        ),
        ({"steps": [{"type": "call_webhook", "url": "http://[::1"}]}, "steps[0]", "Invalid IPv6 URL"),
        (
            {"steps": [{"type": "call_webhook", "url": "https://x", "data": json.loads("[" * 40 + "]" * 40)}]},
            "steps[0]",
            "nested deeper",
        ),
        ({"conditions": {"field": "a", "op": "in", "value": ["x" * 1000] * 200}}, "", "bytes long"),
        ({"conditions": {"field": "a", "op": "eq", "value": float("nan")}}, "", "NaN"),
    ],
)
def test_what_could_never_work_is_refused_with_its_place(over, place, word):
    with pytest.raises(BadDefinition) as refused:
        read(definition(**over))
    assert any(where == place and word in what for where, what in refused.value.problems), refused.value.problems


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(["name", "trigger", "steps", "conditions"]), json_values))
def test_no_shape_of_a_definition_breaks_its_reading(raw):
    try:
        read(json.loads(json.dumps(raw, default=str)))
    except BadDefinition as error:
        assert error.problems  # noqa: PT017
