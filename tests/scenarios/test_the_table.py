"""The table of the scenarios names tests that there are, and every scenario."""

import ast
import re
from pathlib import Path

from tests import scenarios

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"(tests/\S+?\.py)(?:::(\w+))?(?=\s)", scenarios.__doc__ or "")


def test_every_scenario_is_in_the_table():
    assert re.findall(r"^    (S\d+)", scenarios.__doc__ or "", re.MULTILINE) == [f"S{n}" for n in range(1, 15)]


def test_every_test_in_the_table_exists():
    missing = []
    for path, name in NAMED:
        file = ROOT / path
        if not file.exists():
            missing.append(path)
            continue
        tests = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        if not any(test == name if name else test.startswith("test_") for test in tests):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_module_here_is_in_the_table():
    here = {f"tests/scenarios/{file.name}" for file in Path(__file__).parent.glob("test_*.py")}
    assert here - {path for path, _ in NAMED} == {"tests/scenarios/test_the_table.py"}
