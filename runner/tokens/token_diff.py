"""The first difference of two sequences, and a readable view of two lists of token ids around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # a process that probes a template does not load a vocabulary
    from runner.tokens.tokenizer import Tokenizer

__all__ = ["first_mismatch", "token_diff"]

_IDS_BEFORE_COUNT: Final = 4
"""Number of ids shown before the first difference."""
_COLUMN_COUNT: Final = 12
"""Number of ids shown in total, which fit a line of a terminal."""
_TEXT_CHARS: Final = 40
"""Number of characters of text shown on each side of the first difference."""


def first_mismatch(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ; the shorter length if one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def token_diff(
    recorded: Sequence[int], now: Sequence[int], tokenizer: Tokenizer, names: tuple[str, str] = ("recorded", "now")
) -> str:
    """Return both lists around their first difference: as text, and id by id, with marks under the ids that differ."""
    at = first_mismatch(recorded, now)
    begin = max(0, at - _IDS_BEFORE_COUNT)
    columns = list(_columns(recorded[begin : begin + _COLUMN_COUNT], now[begin : begin + _COLUMN_COUNT]))[
        :_COLUMN_COUNT
    ]
    sides = [[_cell(column[side], tokenizer) for column in columns] for side in (0, 1)]
    widths = [max(map(len, cells)) for cells in zip(*sides, strict=True)]
    marks = ["" if one == other else "^" * width for (one, other), width in zip(columns, widths, strict=True)]
    margin = max(map(len, names))
    rows = [_row(name, cells, widths, margin) for name, cells in zip(names, sides, strict=True)]
    texts = [
        f"  {name:{margin}}  {_text(ids, at, tokenizer)}" for name, ids in zip(names, (recorded, now), strict=True)
    ]
    return "\n".join([*texts, f"  {f'id {begin}':{margin}}", *rows, _row("", marks, widths, margin)])


def _columns(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int | None, int | None]]:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    for _, start, end, other_start, other_end in matcher.get_opcodes():
        yield from zip_longest(one[start:end], other[other_start:other_end])


def _cell(token_id: int | None, tokenizer: Tokenizer) -> str:
    return "" if token_id is None else f"{token_id}:{tokenizer.decode([token_id])!r}"


def _row(name: str, cells: Sequence[str], widths: Sequence[int], margin: int) -> str:
    line = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"  {name:{margin}}  {line}".rstrip()


def _text(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> str:
    before = tokenizer.decode(ids[max(0, at - _TEXT_CHARS) : at])
    after = tokenizer.decode(ids[at : at + _TEXT_CHARS])
    return f"{before[-_TEXT_CHARS:]!r} then {after[:_TEXT_CHARS]!r}"
