"""The OpenAPI document: committed as it is made, and kept by the API, which schemathesis attacks by it."""

import json
from importlib.resources import files

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from afluente.web.api import openapi
from afluente.web.api.app import OPERATIONS, PREFIX
from afluente.web.api.problems import KINDS, TYPES_AT

EXAMPLES = {"POST": 12, "GET": 8, "DELETE": 5}
# What a schema does not say: that a phone can be one, that a cursor is ours, the years that a time lies in.
ACCEPTS = ["2xx", "404", "422"]


def test_the_committed_document_is_the_one_that_is_made(address):
    committed = (files("afluente.web.api") / openapi.DOCUMENT_FILE).read_text("utf-8")
    assert committed == openapi.render(), "afluente web openapi > afluente/web/api/openapi.json"


def test_every_operation_and_every_problem_is_in_it():
    document = openapi.document()
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    assert described == {(operation.method, PREFIX + operation.path) for operation in OPERATIONS}
    assert document["components"]["schemas"]["Problem"]["properties"]["type"]["enum"] == [TYPES_AT + s for s in KINDS]
    assert {str(kind.status) for kind in KINDS.values()} == document["components"]["responses"].keys()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}")
def test_schemathesis_finds_no_difference_between_document_and_api(operation, address, key, make_key, organization):
    schema = schemathesis.openapi.from_dict(json.loads(openapi.render()))
    schema.config.base_url = address
    schema.config.checks.positive_data_acceptance.expected_statuses = ACCEPTS
    attacked = schema[PREFIX + operation.path][operation.method]
    wanted = make_key(organization, rate_burst=1_000_000).text
    answered = set()
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]

    @given(st.one_of(*(attacked.as_strategy(generation_mode=mode) for mode in modes)))
    @settings(
        max_examples=EXAMPLES[operation.method],
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attack(case):
        answered.add(case.call_and_validate(headers={"Authorization": f"Bearer {wanted}"}).status_code)

    attack()
    if operation.method == "POST":  # what is made up is seldom a fact that fits: the documented one must be
        name = {"/events": "EventIn", "/contact-events": "ContactEventIn"}[operation.path]
        case = attacked.Case(
            body=schema.raw_schema["components"]["schemas"][name]["examples"][0], media_type="application/json"
        )
        answered.add(case.call_and_validate(headers={"Authorization": f"Bearer {wanted}"}).status_code)
    if "{" not in operation.path:
        assert answered & {200, 201, 207}, "nothing was accepted, so nothing was tested"
