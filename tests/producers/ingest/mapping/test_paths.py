"""Paths into JSON: what they find, what they refuse, and that no document makes one fail."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.ingest.mapping import paths

DOCUMENT = {
    "a": {"b": [{"c": 1}, {"c": 2}, {"d": 3}], "x.y": "dotted", "": "unnamed"},
    "list": [[1, 2], [3]],
    "null": None,
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.b[0].c", [1]),
        ("a.b[-1].d", [3]),
        ("a.b[*].c", [1, 2]),
        ('a["x.y"]', ["dotted"]),
        ("list[0][1]", [2]),
        ("null", [None]),
        ("a.b[3].c", []),
        ("a.b.c", []),
        ("a[0]", []),
        ("list.a", []),
        ("missing.a.b", []),
        ("@", ["the item"]),
        ("@.c", []),
    ],
)
def test_what_a_path_finds(text, found):
    assert paths.parse(text).find(DOCUMENT, "the item") == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "1 to 200 characters"),
        ("a" * 201, "1 to 200 characters"),
        ("a..b", "character 3"),
        ("a.", "a key is missing"),
        ("a[", "has no ]"),
        ("a[x]", "neither a place"),
        ("a[1e3]", "neither a place"),
        ("a[99999]", "neither a place"),
        ('a["b', 'has no "]'),
        ("a]", "does not belong"),
        ("a@b", "does not belong"),
        ("[*][*]", "at most one [*]"),
        (".".join("a" * 17), "at most 16 steps"),
        ("k" * 101, "longer than 100"),
    ],
)
def test_what_is_no_path(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        paths.parse(text)


def test_no_more_is_found_than_the_bound():
    document = {"rows": [[{"a": 1}] * 1000]}
    assert len(paths.parse("rows[0][*].a").find(document)) == paths.MAX_FOUND


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=20,
)
_steps = st.lists(st.sampled_from(["a", "b", "[0]", "[-1]", "[*]"]), min_size=1, max_size=8)


@given(_json, _steps)
def test_no_document_makes_a_path_fail(document, steps):
    text = ".".join(steps).replace(".[", "[")
    if steps.count("[*]") > 1:
        return
    assert len(paths.parse(text).find(document)) <= paths.MAX_FOUND


@given(st.text(max_size=60))
def test_no_text_makes_the_parser_fail(text):
    try:
        path = paths.parse(text)
    except ValueError:
        return
    assert path.find({}) in ([], [{}], [None])
