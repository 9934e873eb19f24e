"""Table of the patches of vLLM: complete, and each with a test that fails when the patch is no longer needed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.engines.vllm import worker

TESTS = Path(__file__).parent.parent.parent
ENTRY_POINTS = {"grammar_patch.patch_engine_core", "spin_wait_patch.patch_waiting_processes"}  # these call a patch
ROW = re.compile(r"^\| `([\w.]+)` \|.*\| `([\w/]+\.py)` \|$", re.MULTILINE)
ROWS = dict(ROW.findall(worker.__doc__ or ""))
UPSTREAM = re.compile(r"(vllm|xgrammar)\b")


def functions(source: str) -> Iterator[ast.FunctionDef]:
    return (statement for statement in ast.parse(source).body if isinstance(statement, ast.FunctionDef))


def changes_upstream(function: ast.FunctionDef) -> bool:
    """True if a function sets an attribute of an object that it gets from a module of vLLM or xgrammar."""
    upstream: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.ImportFrom(module=str(module)) if UPSTREAM.match(module):
                upstream |= {alias.asname or alias.name for alias in node.names}
            case ast.Import():
                names = [alias for alias in node.names if UPSTREAM.match(alias.name)]
                upstream |= {alias.asname or alias.name.partition(".")[0] for alias in names}
            case ast.For(target=ast.Name(name), iter=values) if is_upstream(values, upstream):
                upstream.add(name)
            case ast.Assign(value=value):
                for target in node.targets:
                    if isinstance(target, ast.Name) and is_upstream(value, upstream):
                        upstream.add(target.id)
                    elif not isinstance(target, ast.Name) and changed(target) in upstream:
                        return True
            case ast.Call(func=ast.Name("setattr"), args=[target, *_]) if changed(target) in upstream:
                return True
    return False


def is_upstream(value: ast.expr, upstream: set[str]) -> bool:
    """True if an expression contains one of these names or the name of a module."""
    return any(
        (isinstance(node, ast.Name) and node.id in upstream)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(UPSTREAM.match(node.value)))
        for node in ast.walk(value)
    )


def changed(target: ast.expr) -> str:
    """The name of the object that an assignment changes, as in `name.a.b = 1` and in `vars(name)["a"] = 1`."""
    while True:
        match target:
            case ast.Name(name):
                return name
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Call(args=[value, *_]):
                target = value
            case _:
                return ""


def test_every_patch_of_vllm_is_in_the_table() -> None:
    patches = {
        f"{path.stem}.{function.name}"
        for path in Path(worker.__file__).parent.glob("*.py")
        for function in functions(path.read_text(encoding="utf-8"))
        if function.name.startswith("patch_") or changes_upstream(function)
    }
    assert ROWS.keys() == patches - ENTRY_POINTS


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("import vllm.v1 as theirs\n theirs.core.wait = ours", True),
        ("import xgrammar\n xgrammar.apply = ours", True),
        ("from vllm.v1 import Core\n Core.wait = ours", True),
        ("from vllm.v1 import Core\n setattr(Core, NAME, ours)", True),
        ("module = sys.modules.get('vllm.v1')\n kind = getattr(module, 'Core')\n kind.wait = ours", True),
        ("from vllm import core, rest\n for module in (core, rest):\n  module.wait = ours", True),
        ("network = sys.modules.get('vllm.v1')\n vars(network)['tempfile'] = ours", True),
        ("from vllm.v1 import Core\n core = Core()\n given.wait = core", False),
        ("given.wait = ours\n setattr(given, NAME, ours)", False),
    ],
)
def test_functions_that_change_vllm_are_found_under_any_name(body: str, changes: bool) -> None:
    (function,) = functions(f"def prepare(given):\n {body}")
    assert changes_upstream(function) is changes


def test_each_patch_has_a_test_of_the_unpatched_behaviour() -> None:
    tests = {file: (TESTS / file).read_text(encoding="utf-8") for file in ROWS.values()}
    counts = {file: len(re.findall(r"^(?:async )?def test_unpatched_", text, re.M)) for file, text in tests.items()}
    assert {file for file, needed in Counter(ROWS.values()).items() if counts[file] < needed} == set()


def test_table_has_a_version_and_a_condition_for_each_patch() -> None:
    rows = [line.split("|")[1:-1] for line in (worker.__doc__ or "").splitlines() if line.startswith("| `")]
    assert rows
    assert all(len(row) == 5 and all(cell.strip() for cell in row) for row in rows)
    assert not [row for row in rows if not re.fullmatch(r" (vLLM|xgrammar) \d+(\.\d+)+ ", row[2])]
