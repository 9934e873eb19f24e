"""Patterns of schemas have the same meaning in Rust and Python, and no text of a model makes them slow."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner.errors import WrongArguments
from runner.tools.ecma_patterns import BadPattern, matches, python_pattern
from runner.tools.tool import Tool

SLOW = {
    "nested repetition": r"^(a+)+$",
    "repeated alternatives": r"^(a|a)*$",
    "two of the same": r"(x+x+)+y",
    "words": r"^(\w+\s?)*$",
    "mail address": r"^([a-zA-Z0-9])(([\-.]|[_]+)?([a-zA-Z0-9]+))*(@){1}[a-z0-9]+[.]{1}([a-z]{2,3})$",
    "path": r"^(/?[a-zA-Z0-9_\-]+)+\.json$",
}


def tool_with(parameters: dict[str, Any]) -> Tool:
    return Tool(lambda given: given, name="do", description="Do.", parameters=parameters, raw=True)


@pytest.mark.parametrize("pattern", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("where", ["values", "names"])
def test_no_text_makes_the_check_of_a_pattern_slow(pattern: str, where: str) -> None:
    inner = {"properties": {"a": {"pattern": pattern}}} if where == "values" else {"patternProperties": {pattern: {}}}
    tool = tool_with({"type": "object", "additionalProperties": False, **inner})
    text = "a" * 5000 + "x" * 5000 + "!"
    with pytest.raises(WrongArguments):
        tool.arguments({"a": text} if where == "values" else {text: 1})


ATOMS = (
    *(
        "a",
        "b",
        "é",
        "[ab]",
        "[^a]",
        "[à-ÿ]",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\S",
        r"[\s\S]",
        r"[\Sx]",
        "^",
        "$",
        "{",
        r"\-",
    ),
    *("(a|b)", "(?:ab|)", "(?<n>a)", r"\.", "[a&&b]", "[[a]", "[a~~b]", "[a||]", "[.-]", r"\x41", "[]", "[^]", r"\/"),
    *(r"\b", r"\B", "(?=a)", "(?!a)", "(?<=a)", "(?i:A)", "a{2}", "a{1,3}", "[^]a]"),
)
TEXTS = (
    *("", "a", "ab", "\n", "a\n", "é", "1", "A", " ", "\x1c", "\x85", "{", "&", "~", "|", "[", "]", "aab", "a.b", "/"),
    *("-", "b\x1f", "aaa", "\ud800", "a\u2028", "a b", "٣"),
)


def test_a_pattern_is_found_where_python_finds_it() -> None:
    chance, compared = random.Random(5), 0
    while compared < 400:
        parts = (chance.choice(ATOMS) + chance.choice(("", "", "*", "+", "?", "{0,2}", "*?")) for _ in range(4))
        try:
            pattern = python_pattern("".join(list(parts)[: chance.randint(1, 4)]))
        except BadPattern:
            continue
        compared += 1
        found = {text for text in TEXTS if matches(pattern, text)}
        assert found == {text for text in TEXTS if pattern.search(text)}, pattern.pattern


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^(?!.*--)[a-z-]+$", "a-b", "a--b"),
        (r"^(?<q>['x]).*\k<q>$", "'a'", "'a"),
        (r"\bcat\b", "a cat", "cats"),
        ("^[a-z]{1,9000}$", "abc", "ABC"),
    ],
    ids=["look-around", "back reference", "border of a word", "too large for Rust"],
)
def test_pattern_that_rust_cannot_match_is_matched(pattern: str, good: str, bad: str) -> None:
    assert matches(python_pattern(pattern), good)
    assert not matches(python_pattern(pattern), bad)


def test_only_names_without_a_pattern_are_unknown() -> None:
    parameters: dict[str, Any] = {"type": "object", "patternProperties": {"^x-[0-9]$": {"type": "integer"}}}
    tool = tool_with({**parameters, "additionalProperties": False})
    assert tool.arguments({"x-1": 1}) == {"x-1": 1}
    with pytest.raises(WrongArguments) as raised:
        tool.arguments({"x-1": 1, "y": 2})
    assert "y" in str(raised.value)
    assert "x-1" not in str(raised.value)
    numbers = tool_with({**parameters, "additionalProperties": {"type": "number"}})
    assert numbers.arguments({"x-1": 1, "y": 2.5}) == {"x-1": 1, "y": 2.5}
    for wrong in ({"x-1": 1.5}, {"y": "2"}):
        with pytest.raises(WrongArguments):
            numbers.arguments(wrong)
