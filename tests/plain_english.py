"""Check of names and prose: `python -m tests.plain_english [-v] [PART ...]`, part of `make check`.

A part is a package or a module of `runner/`, another folder, or a file at the top of the repository. Each has a
budget of faults, which may only fall: the check also fails where a part has fewer faults than its budget.

- A docstring, a comment, and a paragraph or a list item of a page, does not begin with a subordinate clause (What,
  Whether, Whoever, Those, ...).
- A docstring does not begin with a verb in the third person ("Reads the ...").
- Docstrings, comments, strings and pages avoid the words in `AVOIDED`.
- Pages, and docstrings, comments and strings of `runner/`, do not personify code by the words in `PERSONIFIED`.
- A numeric constant of a module or a class ends in a unit or in its role.
- Names of modules, and names that they bind, are neither old nor unclear (`tests/old_names.py`), except in `tests/`.
- A class name occurs once in `runner/`, with and without an underscore.
- The name of a test has at most `MAX_TEST_NAME_CHARS` characters after `test_`.
- The name of a test contains no word of `UNCLEAR_IN_NAMES`, and does not begin with one of `HEADLESS_NAME`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.old_names import unclear_names

ROOT: Final = Path(__file__).parent.parent

CODE: Final = ("runner", "envs", "examples", "templates", "tests")
"""Folders whose modules all rules apply to."""
PAGES: Final = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "pyproject.toml"),
    *("mkdocs.yml", ".pre-commit-config.yaml", "CITATION.cff", "constraints.txt"),
    *("docs", ".ci", ".github", "templates", "runner/report/templates"),
)
"""Other text, which only the rules about words and beginnings apply to: files, and folders with their files."""
PAGE_SUFFIXES: Final = ("", ".md", ".toml", ".yml", ".yaml", ".cff", ".txt", ".jinja", ".js", ".css")

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
    r"\bbegins? of\b|\b(the|an?|its|their) begin\b": "beginning, start",
    r"\bsuch a one\b|\bthe likes of\b": "name it",
    r"\b(tells|told|hears|heard)\b(?! from)": "notifies, reports, receives",
    r"\bgoes on\b|\bgo on\b|\bwent on\b": "continues",
    r"\bstands? still\b|\bstood still\b": "is paused",
    r"\bmeanwhile\b": "during X",
    r"\blikeliest\b": "most likely",
    r"\bon its own account\b|\bof old\b|\bnought\b|\bthereof\b|\bwherein\b|\bhitherto\b": "say it plainly",
}
"""Pattern of a word that slows readers, and what to write instead."""

PERSONIFIED: Final = {r"\b(says?|knows?)\b(?![:=(])": "contains, reports, has, is known"}
"""Pattern of a word that personifies code; checked in pages, and in docstrings and comments of `runner/`."""

PERSONIFIED_IN_STRINGS: Final = {r"\b(says|knows)\b(?![:=(])": "returns, lists, names"}
"""The same for strings of `runner/`. Some contain words of a model, such as "I do not know."."""

MAX_TEST_NAME_CHARS: Final = 60

UNCLEAR_IN_NAMES: Final = re.compile(
    r"(?<!here)_(is|are|was|were)_no_(?!longer_|more_)|_(told_|anew_|whoever_|whichever_|(no|some)bodys?_|everybody_|behind_"
    r"|gives_|heard_|hears_|tells_|meanwhile_|(goes|go|went|gone)_on_|nought_|stands?_still_|stood_still_"
    r"|of_(its|their)_making_|such_a_one_|says?_|knows?_|mend(ed|ing)?_|it_too_|(so|alike)_$)"
)
"""Words that slow readers of a test's name, with an underscore at both ends."""

HEADLESS_NAME: Final = re.compile(
    r"test_(what(ever)?|who(se|ever)?|of|that|those|and|also|how(ever)?|where(ver)?|it|there)_"
)
"""Beginnings of a test's name that put something else before its subject."""

MAX_PLACES: Final = 20
"""Places that are printed for a part over its budget, without -v."""

ANY_AVOIDED: Final = re.compile("|".join(AVOIDED), re.IGNORECASE)

ANY_PERSONIFIED: Final = re.compile("|".join(PERSONIFIED), re.IGNORECASE)

PERSONIFIED_STRING: Final = re.compile("|".join(PERSONIFIED_IN_STRINGS), re.IGNORECASE)

CODE_SPAN: Final = re.compile(r"`[^`]*`")
CODE_OF_PAGE: Final = re.compile(r"^ *```.*?^ *```|`(?:[^`\n]|\n(?! *\n))*`", re.MULTILINE | re.DOTALL)
"""A code block or a code span, which may continue on the next line."""
PLACEHOLDER: Final = re.compile(r"\{[^{}]*\}")
"""A placeholder of `str.format`, whose name is not prose."""

HEADLESS_PARAGRAPH: Final = re.compile(r"(What|Whatever|Whether|Whose|Which|Those|That)\b(?!.*\?)")
"""Beginning of a paragraph without a subject: "When" and "How" may begin a sentence or a heading there."""
HEADLESS: Final = re.compile(r"(What|Whatever|Whether|Whoever|Who|Whose|Which|Those|That|How|Where|When|Why|Because)\b")
THIRD_PERSON: Final = re.compile(r"[A-Z][a-z]*[a-rt-z]s (?!a (second|turn)\b)(an?|the|every|each|all|both|its|their)\b")
"""Beginning of a docstring with a verb, such as "Reads the"; not "Turns a second"."""
HEADLESS_COMMENT: Final = re.compile(
    r"#[ :]*(what(ever)?|whether|who(ever|se)|which(ever)?|those|that)\b(?!.*\?)", re.IGNORECASE
)
LIST_ITEM: Final = re.compile(r" *([-*]|\d+\.) +(\[.\] +)?")
UNITS: Final = re.compile(
    r"(_(SECONDS|MS|NS|US|BYTES|KIB|MIB|GIB|SIZE|IDS|TOKENS|CHARS|CHARACTERS|LINES|ROWS|COUNT|DEPTH|LENGTH|WIDTH|HEIGHT"
    r"|COLUMNS|VERSION|LIMIT|PORT|RATIO|SHARE|FACTOR|RATE|BITS|CODE|STATUS|LEVEL|TOLERANCE|PERCENT|NATS|EPISODES"
    r"|TURNS|TIMES|TRIES|SEED|WORKERS|THREADS|TASKS|CALLS|BASE|INDEX|ERRORS|ENTRIES|ITEMS|DAYS|HOURS|MINUTES|ID))$"
    r"|^_?(MAX|MIN|DEFAULT)_"
)

RULES: Final = ("headless texts", "avoided words", "constants", "names")
"""The rules whose faults are counted, in the order of their numbers."""

BUDGET: Final[dict[str, tuple[int, ...]]] = {
    "tests": (0, 14, 0, 0),
    "training": (0, 1, 0, 0),  # the text of a proof, whose ids must not change
}
"""Faults of each rule, by part. A part that is not listed has a budget of 0."""

WORD_LISTS: Final = frozenset({"tests/old_names.py", "tests/plain_english.py"})
"""Modules of this check, whose strings are the avoided words."""


@dataclass(frozen=True)
class Fault:
    """One place that breaks a rule."""

    rule: int
    where: str
    text: str


def faults_of(path: Path) -> Iterator[Fault]:
    """Find the faults of one module, or of one page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from faults_of_module(source, path.relative_to(ROOT).as_posix())
        return
    name, lines = path.relative_to(ROOT).as_posix(), source.splitlines()
    yield from avoided_words(enumerate(lines, 1), name)
    yield from avoided_words(enumerate(without_code(source).splitlines(), 1), name, PERSONIFIED, ANY_PERSONIFIED)
    if path.suffix == ".md":
        for number, line in paragraphs(source):
            if HEADLESS_PARAGRAPH.match(line):
                yield Fault(0, f"{name}:{number}", line[:100])
    else:
        found = ((number, re.search(r"(?<!\S)#", line)) for number, line in enumerate(lines, 1))
        yield from headless_comments(source, ((number, begin.start()) for number, begin in found if begin), name)


def without_code(page: str) -> str:
    """Return a page without its code, with as many lines."""
    return CODE_OF_PAGE.sub(lambda code: "\n" * code[0].count("\n"), page)


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """First lines of the paragraphs and list items of a page, outside of code, with their numbers."""
    is_code, before = False, ""
    for number, line in enumerate(page.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        item = LIST_ITEM.match(line)
        if line and not is_code and (item or not before.strip()):
            yield number, line[item.end() :] if item else line
        before = line


def headless_comments(source: str, begins: Iterable[tuple[int, int]], name: str) -> Iterator[Fault]:
    """Find the comments that begin with a subordinate clause. A comment below another one continues it.

    Args:
        source: the text of the file.
        begins: the line of each comment, counted from 1, and the column of its #.
        name: the name of the file.
    """
    lines, before = source.splitlines(), -1
    for number, column in begins:
        line = lines[number - 1]
        continues = before == number - 1 and not line[:column].strip()
        if not continues and HEADLESS_COMMENT.match(line, column):
            yield Fault(0, f"{name}:{number}", line[column:][:100])
        before = number


def faults_of_module(source: str, name: str) -> Iterator[Fault]:
    """Find the faults of a module with this source and name."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))) if begins_unclearly(text.lstrip()):
                    yield Fault(0, f"{name}:{child.lineno}", text.strip().splitlines()[0])
        if isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef) and not is_enum(node)):
            for constant, line in numeric_constants(node.body):
                if not UNITS.search(constant):
                    yield Fault(2, f"{name}:{line}", constant)
    if name not in WORD_LISTS:
        yield from avoided_words(strings(tree), name)
        yield from avoided_words(comments(source, ANY_AVOIDED), name)
    if HEADLESS_COMMENT.search(source):
        yield from headless_comments(source, (token.start for token in comment_tokens(source)), name)
    if name.startswith("runner/"):
        yield from avoided_words(docstrings(tree), name, PERSONIFIED, ANY_PERSONIFIED)
        yield from avoided_words(comments(source, ANY_PERSONIFIED), name, PERSONIFIED, ANY_PERSONIFIED)
        if PERSONIFIED_STRING.search(source):
            texts = strings(tree, with_docstrings=False)
            yield from avoided_words(texts, name, PERSONIFIED_IN_STRINGS, PERSONIFIED_STRING)
    if not name.startswith("tests/"):
        yield from (Fault(3, where, text) for where, text in unclear_names(tree, name))


def begins_unclearly(docstring: str) -> bool:
    """True if a docstring begins neither with a noun phrase nor with an imperative."""
    return bool(HEADLESS.match(docstring) or THIRD_PERSON.match(docstring))


def avoided_words(
    lines: Iterator[tuple[int, str]],
    name: str,
    words: Mapping[str, str] = AVOIDED,
    any_word: re.Pattern[str] = ANY_AVOIDED,
) -> Iterator[Fault]:
    """Find the avoided words in lines of text; `any_word` matches all of `words`."""
    for number, text in lines:
        plain = PLACEHOLDER.sub("", text)
        if any_word.search(plain):  # one search first, since few lines have an avoided word
            for pattern, better in words.items():
                for found in re.finditer(pattern, plain, re.IGNORECASE):
                    yield Fault(1, f"{name}:{number}", f"{found[0]!r} ({better}): {text.strip()[:100]}")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines of the strings that are statements, without the code in backticks."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for offset, line in enumerate(text.splitlines()):
                    yield node.lineno + offset, CODE_SPAN.sub("", line)


def strings(tree: ast.AST, *, with_docstrings: bool = True) -> Iterator[tuple[int, str]]:
    """Lines of the literal text of strings, from the syntax tree: the tokens of f-strings differ between Pythons."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Expr(value=ast.Constant()) if not with_docstrings:
                continue
            case ast.Constant(value=str(text)):
                parts = [text]
            case ast.JoinedStr(values=values):
                parts = [str(part.value) for part in values if isinstance(part, ast.Constant)]
                waiting.extend(part for part in values if not isinstance(part, ast.Constant))
            case _:
                waiting.extend(ast.iter_child_nodes(node))
                continue
        for offset, line in enumerate("".join(parts).splitlines()):
            yield node.lineno + offset, line


def comments(source: str, any_word: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Comments with their lines. A module that has none of these words after a # is skipped."""
    if any(any_word.search(line) for line in source.splitlines() if "#" in line):
        for token in comment_tokens(source):
            yield token.start[0], token.string


def comment_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """The comments of a module as tokens."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token


def numeric_constants(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Names of the constants of a module or a class that are set to a number, with their lines."""
    for node in body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                if name.isupper() and value is not None and is_number(value):
                    yield name, node.lineno


def is_enum(node: ast.ClassDef) -> bool:
    """True for an enumeration, whose members are not constants with a unit."""
    return any(ast.unparse(base).endswith(("Enum", "Flag")) for base in node.bases)


def is_number(value: ast.expr) -> bool:
    """True if an expression consists of numbers alone."""
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
        f"{file}: {name}"
        for file, name in names_of_tests(folder)
        if len(name.removeprefix("test_")) > MAX_TEST_NAME_CHARS
    ]


def unclear_test_names(folder: Path) -> list[str]:
    """Names of tests with an unclear word or without a subject at the beginning, as "file: name"."""
    return [
        f"{file}: {name}"
        for file, name in names_of_tests(folder)
        if HEADLESS_NAME.match(name) or UNCLEAR_IN_NAMES.search(f"{name}_")
    ]


def names_of_tests(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each test function below a folder: its file there and its name."""
    for path in sorted(folder.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", source, re.MULTILINE):
            yield path.relative_to(folder), name


def repeated_classes(folder: Path) -> list[str]:
    """Names that several classes have, nested ones too; `Run` and `_Run` are one name."""
    names = Counter(
        node.name.lstrip("_")
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def part_of(path: Path) -> str:
    """The part of a file: its package in `runner/`, else its folder or its own name at the top."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "runner" else parts[0]


def files() -> list[Path]:
    """All modules and pages that are checked."""
    modules = [path for name in CODE for path in (ROOT / name).rglob("*.py")]
    pages = [path for name in PAGES for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])]
    return sorted({*modules, *(path for path in pages if path.is_file() and path.suffix in PAGE_SUFFIXES)})


def main() -> int:
    """Print the counts, and return 1 if one differs from its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", help="packages of runner/, other folders, or files; all by default")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every place of every part")
    options = parser.parse_args()

    paths = files()
    if unknown := {*options.parts} - {*map(part_of, paths)}:
        parser.error(f"no part of the repository: {', '.join(sorted(unknown))}; such as cluster, models.py or docs")
    found: dict[str, list[Fault]] = defaultdict(list)
    for path in paths:
        if not options.parts or part_of(path) in options.parts:
            found[part_of(path)].extend(faults_of(path))

    failed = False
    for part, faults in sorted(found.items()):
        counts = tuple(sum(fault.rule == rule for fault in faults) for rule in range(len(RULES)))
        budget = BUDGET.get(part, (0,) * len(RULES))
        failed |= counts != budget
        over = any(count > limit for count, limit in zip(counts, budget, strict=True))
        if over or options.verbose:
            print(f"{part}: {', '.join(RULES)}: {counts}, budget {budget}")
            places = sorted(faults, key=lambda fault: fault.rule)
            printed = places if options.verbose else places[:MAX_PLACES]
            for fault in printed:
                print(f"  {fault.where}: {fault.text}")
            if left := len(places) - len(printed):
                print(f"  and {left} more; -v shows them")
        elif counts != budget:
            print(f"{part}: lower the budget in tests/plain_english.py from {budget} to {counts}")
    if twice := repeated_classes(ROOT / "runner"):
        failed = True
        print(f"class names that occur twice in runner/: {', '.join(twice)}")
    if long := long_test_names(ROOT / "tests"):
        failed = True
        print(f"names of tests with more than {MAX_TEST_NAME_CHARS} characters:", *long, sep="\n  ")
    if unclear := unclear_test_names(ROOT / "tests"):
        failed = True
        print("names of tests with an unclear word, or without a subject at the beginning:", *unclear, sep="\n  ")
    lines = {
        name: sum(len(path.read_text().splitlines()) for path in (ROOT / name).rglob("*.py"))
        for name in ("runner", "tests")
    }
    modules = sum(1 for _ in (ROOT / "runner").rglob("*.py"))
    print(f"size: runner {lines['runner']:,} lines in {modules} modules, tests {lines['tests']:,} lines")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
