"""Reasoning told apart from what was said."""

import pytest

from runner.parsing import split_reasoning


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
        ("the tag <think> is content here</think>", False, ("", "the tag <think> is content here</think>")),
    ],
)
def test_reasoning_is_split_from_content(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split_reasoning(text, opened) == expected
