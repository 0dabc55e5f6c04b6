"""The table of the complaints names tests that there are, and every complaint."""

import ast
import re
from pathlib import Path

from tests.consumers import complaints

ROOT = Path(__file__).parents[3]
FOLDER = "tests/consumers/complaints"
NUMBERS = (1, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 22, 23, 25, 26)
NAMED = re.findall(r"(tests/\S+?\.py)(?:::(\w+))?(?=\s)", complaints.__doc__ or "")


def test_every_complaint_is_in_the_table():
    assert re.findall(r"^    (C\d+)", complaints.__doc__ or "", re.MULTILINE) == [f"C{n}" for n in NUMBERS]


def test_every_test_in_the_table_exists():
    missing = []
    for path, name in NAMED:
        file = ROOT / path
        nodes = ast.parse(file.read_text()).body if file.exists() else []
        tests = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        if not any(test == name if name else test.startswith("test_") for test in tests):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_module_here_is_in_the_table():
    here = {f"{FOLDER}/{file.name}" for file in Path(__file__).parent.glob("test_*.py")}
    assert here - {path for path, _ in NAMED} == {f"{FOLDER}/test_the_table.py"}
