"""Turn formats of templates of the corpus, and turns written in them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from runner.parsing.call_writer import Unwritable, WrittenCall, id_for, write_calls
from runner.parsing.learning.learnt_format import learn_format
from runner.parsing.turn_format import TurnFormat
from runner.parsing.turn_reader import USUAL
from runner.tokens.tool_support import missing_tool_property
from tests import sweeps
from tests.conformance.corpus import corpus

__all__ = ["WrittenTurn", "format_of", "formats", "schemas_of", "turns", "write_turn"]


@functools.cache
def format_of(name: str) -> TurnFormat:
    """Return the format of the template with this name."""
    return learn_format(next(entry for entry in corpus() if entry.name == name).renderer()).format


@functools.cache
def formats(one_in: int) -> Mapping[str, TurnFormat]:
    """Return the distinct readable formats by template: every n-th of them, or all in a whole sweep."""
    found: dict[str, TurnFormat] = {}
    for entry in sweeps.part(corpus(), one_in):
        if missing_tool_property(entry.renderer()) is None:
            form = format_of(entry.name)
            if form.calls is not None and form not in found.values():
                found[entry.name] = form
    return found


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """An assistant's turn."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    content: str = ""
    thought: str | None = None


WORDS = st.sampled_from(["look_up", "refresh", "ns.tool", "get-weather"])
KEYS = st.sampled_from(["query", "limit", "zone", "c-d"])
MARKS = ["<", "</", "{", "}", "[", "]", '"', "'", "\\", "\n", " ", ",", "=", "|>", "a", "b c", "<b>", "</think", "é"]
TEXTS = st.lists(st.sampled_from(MARKS), max_size=8).map("".join)
VALUES = st.one_of(TEXTS, TEXTS, st.integers(-5, 10**6), st.booleans(), st.none(), st.lists(TEXTS, max_size=2))
CALLS = st.lists(st.tuples(WORDS, st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3)
turns = st.builds(
    lambda calls, content, thought: WrittenTurn(tuple(calls), content, thought),
    CALLS,
    st.sampled_from(["", "I look it up.", "First < this.\n\nThen <that", "\n  so "]),
    st.sampled_from([None, "", "Well.", "\n a <b \n\n</thin k"]),
)


def write_turn(form: TurnFormat, turn: WrittenTurn) -> str:
    """Return the text of a turn, without parts that its format cannot write."""
    thought, marks = "", form.reasoning or USUAL
    if marks.opened_by_prompt or turn.thought is not None:
        thought = f"{'' if marks.opened_by_prompt else marks.open}{turn.thought or ''}{marks.close}\n\n"
    calls = form.calls
    assert calls is not None
    said = turn.calls if calls.between is not None else turn.calls[:1]
    written = [
        WrittenCall(name, arguments, id_for(calls, name, n) or f"call0000{n}")
        for n, (name, arguments) in enumerate(said)
    ]
    try:
        text = write_calls(calls, written) if written else ""
    except Unwritable:
        text = ""
    content = f"{form.content.open}{turn.content}" if turn.content else ""
    if not text or not content:
        return thought + content + text
    if calls.before_content is not None:
        return thought + text + calls.before_content + content
    return thought + content + (calls.after_content or "") + text


def schemas_of(turn: WrittenTurn) -> dict[str, Any]:
    """Return schemas of the tools of a turn, with the type of each given value."""
    schemas: dict[str, Any] = {}
    for name, arguments in turn.calls:
        properties = schemas.setdefault(name, {"type": "object", "properties": {}})["properties"]
        properties |= {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    return schemas
