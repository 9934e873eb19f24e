"""The marks of a template separate reasoning from content."""

from dataclasses import replace

import pytest

from runner.parsing.turn_format import ReasoningFormat
from runner.parsing.turn_reader import USUAL, ends_in_thought, split_thought


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("just an answer", False, ("", "just an answer")),
        ("  kept as it is ", False, ("", "  kept as it is ")),
        ("<think>\nhm\n</think>\n\nthe answer", False, ("hm", "the answer")),
        ("\n<think></think>the answer", False, ("", "the answer")),
        ("hm\n</think>\n\nthe answer", True, ("hm", "the answer")),
        ("<think>hm</think>the answer", True, ("hm", "the answer")),
        ("hm, and then it was cut", True, ("hm, and then it was cut", "")),
        ("<think>hm, and then it was cut", False, ("hm, and then it was cut", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("</think>the answer", False, ("", "the answer")),
        ("the tag <think> is content here</think>", False, ("", "the tag <think> is content here</think>")),
    ],
)
def test_reasoning_is_split_from_content(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split_thought(text, replace(USUAL, opened_by_prompt=opened)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hm\n[BEGIN]\nthe answer", ("hm", "the answer")),
        ("the answer", ("", "the answer")),
    ],
)
def test_close_alone_marks_reasoning_without_opening_mark(text: str, expected: tuple[str, str]) -> None:
    assert split_thought(text, ReasoningFormat("", "[BEGIN]", opened_by_prompt=False)) == expected


@pytest.mark.parametrize(
    ("text", "opened", "inside"),
    [
        ("<think>hm", False, True),
        ("<think>hm</think>", False, False),
        ("hm", True, True),
        ("hm</think> so", True, False),
        ("an answer", False, False),
    ],
)
def test_turn_may_end_inside_its_reasoning(text: str, opened: bool, inside: bool) -> None:
    assert ends_in_thought(text, replace(USUAL, opened_by_prompt=opened)) is inside
