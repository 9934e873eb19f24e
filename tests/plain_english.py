"""Check of names and prose in `runner/`: `python -m tests.plain_english [-v] [PACKAGE ...]`, part of `make check`.

Five rules, and a budget for each package that may only fall:

- A docstring does not begin with a subordinate clause (What, Whether, Whoever, Those, ...).
- Docstrings, comments and strings avoid the words in `AVOIDED`.
- A class name occurs once.
- A numeric constant ends in a unit or in its role.
- The name of a test has at most `MAX_TEST_NAME_CHARS` characters after `test_`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "runner"

AVOIDED: Final = {
    r"\bwhoever\b": "the caller, the client, ...",
    r"\bwhichever\b": "name the choices",
    r"\banew\b": "again",
    r"\bbehind\b": "after",
    r"(?<!here )\b(is|are|was|were) no\b(?! longer| more)": "is not a",
    r"(?<!here )\b(is|are|was|were) (?-i:none)\b": "is not one, is None",
    r"\bgives\b": "returns, contains",
    r"\bsomebody\b|\bnobody\b": "the caller, no task, ...",
    r"\bof (its|their) making\b": "that it made",
    r"\bsuch a one\b|\bthe likes of\b": "name it",
    r"\b(tells|told|hears|heard)\b(?! from)": "notifies, reports, receives",
    r"\bgoes on\b|\bgo on\b|\bwent on\b": "continues",
    r"\bstands? still\b|\bstood still\b": "is paused",
    r"\bmeanwhile\b": "during X",
    r"\bon its own account\b|\bof old\b|\bnought\b|\bthereof\b|\bwherein\b|\bhitherto\b": "say it plainly",
}
"""Pattern of a word that slows readers, and what to write instead."""

MAX_TEST_NAME_CHARS: Final = 60

PLACEHOLDER: Final = re.compile(r"\{[^{}]*\}")
"""A value in an f-string, whose names are not prose."""

HEADLESS: Final = re.compile(r"(What|Whatever|Whether|Whoever|Who|Whose|Which|Those|That|How|Where|When|Why|Because)\b")
UNITS: Final = re.compile(
    r"(_(SECONDS|MS|NS|US|BYTES|KIB|MIB|GIB|SIZE|IDS|TOKENS|CHARS|CHARACTERS|LINES|ROWS|COUNT|DEPTH|LENGTH|WIDTH|HEIGHT"
    r"|COLUMNS|VERSION|LIMIT|PORT|RATIO|SHARE|FACTOR|RATE|BITS|CODE|STATUS|LEVEL|TOLERANCE|PERCENT|NATS|EPISODES"
    r"|TURNS|TIMES|TRIES|SEED|WORKERS|THREADS|TASKS|CALLS|BASE|INDEX|ERRORS|ENTRIES|ITEMS|DAYS|HOURS|MINUTES|ID))$"
    r"|^_?(MAX|MIN|DEFAULT)_"
)

BUDGET: Final[dict[str, tuple[int, int, int]]] = {
    "tokens": (0, 1, 0),  # a word that templates are probed with
    "training": (0, 1, 0),  # the text of a proof, whose ids must not change
    "wording.py": (0, 1, 0),  # documents a text that a model reads
}
"""Headless docstrings, avoided words and constants without a unit, by package; none for a package not listed."""

ALLOWED_TWICE: Final = frozenset({"Verdict"})
"""Class names that may occur twice: both are public, in `runner` and in `runner.training`."""


@dataclass(frozen=True)
class Fault:
    """One place that breaks a rule."""

    rule: int
    where: str
    text: str


def faults_of(path: Path) -> Iterator[Fault]:
    """Find the faults of one module."""
    source = path.read_text()
    tree = ast.parse(source)
    name = path.relative_to(ROOT)
    for line, text in docstrings(tree):
        if HEADLESS.match(text.lstrip()):
            yield Fault(0, f"{name}:{line}", text.strip().splitlines()[0])
    for line, text in prose(source):
        for pattern, better in AVOIDED.items():
            for found in re.finditer(pattern, PLACEHOLDER.sub("", text), re.IGNORECASE):
                yield Fault(1, f"{name}:{line}", f"{found[0]!r} ({better}): {text.strip()[:100]}")
    for node in tree.body:
        if (constant := numeric_constant(node)) is not None and not UNITS.search(constant):
            yield Fault(2, f"{name}:{node.lineno}", constant)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments and the literal text of strings, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def numeric_constant(node: ast.stmt) -> str | None:
    """The name of a module constant that is set to a number."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            if name.isupper() and value is not None and is_number(value):
                return name
    return None


def is_number(value: ast.expr) -> bool:
    """Whether an expression consists of numbers alone."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
    return False


def long_test_names(folder: Path) -> list[str]:
    """Names of tests that are too long, as "file: name"."""
    return [
        f"{path.relative_to(folder)}: {node.name}"
        for path in sorted(folder.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name.removeprefix("test_")) > MAX_TEST_NAME_CHARS
    ]


def package_of(path: Path) -> str:
    """The package of a module, or the name of a module at the top level."""
    return path.relative_to(SOURCE).parts[0]


def main() -> int:
    """Print the counts, and return 1 where one is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", nargs="*", help="packages of runner/; all by default")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each place")
    options = parser.parse_args()

    paths = sorted(SOURCE.rglob("*.py"))
    if unknown := {*options.packages} - {*map(package_of, paths)}:
        parser.error(f"no package or module of runner/: {', '.join(sorted(unknown))}; such as cluster or models.py")
    found: dict[str, list[Fault]] = defaultdict(list)
    classes: Counter[str] = Counter()
    for path in paths:
        found[package_of(path)].extend(faults_of(path))
        classes.update(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))

    failed = False
    for package, faults in sorted(found.items()):
        if options.packages and package not in options.packages:
            continue
        counts = tuple(sum(fault.rule == rule for fault in faults) for rule in range(3))
        budget = BUDGET.get(package, (0, 0, 0))
        over = any(count > limit for count, limit in zip(counts, budget, strict=True))
        failed |= over
        if over or options.verbose:
            print(f"{package}: headless docstrings, avoided words, constants: {counts}, budget {budget}")
            for fault in sorted(faults, key=lambda fault: fault.rule):
                print(f"  {fault.where}: {fault.text}")
    twice = sorted(name for name, count in classes.items() if count > 1 and name not in ALLOWED_TWICE)
    if twice:
        failed = True
        print(f"class names that occur twice in runner/: {', '.join(twice)}")
    if long := long_test_names(ROOT / "tests"):
        failed = True
        print(f"names of tests with more than {MAX_TEST_NAME_CHARS} characters:", *long, sep="\n  ")
    lines = {
        name: sum(len(path.read_text().splitlines()) for path in (ROOT / name).rglob("*.py"))
        for name in ("runner", "tests")
    }
    print(f"size: runner {lines['runner']:,} lines in {len(paths)} modules, tests {lines['tests']:,} lines")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
