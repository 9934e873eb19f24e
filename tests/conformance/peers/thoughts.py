"""Every distinct way to mark a thought in the corpus, split by us and by each parser of vLLM's, and judged."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from runner.parsing.cut_points import CutPoints
from runner.parsing.learning.probe_renders import FormatProber
from runner.parsing.turn_format import TurnFormat
from runner.parsing.turn_reader import TurnReader
from tests.conformance.corpus import Entry, control_tokens_of
from tests.conformance.peers.calls import OURS
from tests.conformance.peers.groups import Group, grouped, turn_of
from tests.conformance.sweep import spread

__all__ = ["RECORD", "Miss", "ThoughtRow", "marks", "play", "play_all", "recorded", "single_marks", "write"]

RECORD: Final = Path(__file__).with_name("thoughts.jsonl")

Split: TypeAlias = Callable[[str, str], tuple[str, str]]
"""Function from a prompt and a text to the thought and the rest of the text."""


class Miss(enum.StrEnum):
    """The fault of a split."""

    RAISES = "raises an error"
    THOUGHT_LOST = "drops the reasoning"
    THOUGHT_SAID = "takes reasoning for content"
    CONTENT_LOST = "drops content"
    CONTENT_THOUGHT = "takes content for reasoning"
    OTHER = "leaves a mark in the text, or drops one from it"


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn without calls."""

    what: str
    text: str
    thought: str
    content: str


@dataclass(frozen=True, slots=True)
class ThoughtRow:
    """Results of one way to mark thoughts."""

    template: str
    """The template with these marks that most models use."""
    templates: int
    """Number of templates with these marks."""
    models: int
    """Number of models with these templates."""
    marks: str
    """The marks around a thought, and whether the prompt or the model writes the opening mark."""
    trials: int
    """Number of turns that were split."""
    readers: Mapping[str, Mapping[str, str]]
    """The `Miss` of each case, by reader: first our reader, then vLLM's parsers, beginning with the best."""

    def line(self) -> str:
        """Return the row as one line of the record."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the row in a line of the record."""
        return cls(**json.loads(line))


def recorded() -> list[ThoughtRow]:
    """The recorded results."""
    return [ThoughtRow.read(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def write(rows: Iterable[ThoughtRow]) -> None:
    """Save the results."""
    RECORD.write_text("".join(f"{row.line()}\n" for row in rows), encoding="utf-8")


def play_all(turns: Sequence[tuple[Entry, TurnFormat]], processes: int = 2) -> list[ThoughtRow]:
    """Results of all ways, in the order of their templates' names."""
    return spread(play, grouped(turns, marks), processes)


def marks(form: TurnFormat) -> str:
    """Describe the marks around a thought and a content; return "" if the template shows no thought.

    gpt-oss is left out, since its turns have more channels than a thought and a rest.
    """
    thought = form.reasoning
    if thought is None or form.harmony:
        return ""
    who = "the prompt" if thought.opened_by_prompt else "the model"
    opening = f"`{thought.open}` by {who}" if thought.open else "no opening mark"
    return f"{opening}, `{thought.close}`" + (f", then `{_content_open(form)}`" if _content_open(form) else "")


def single_marks(form: TurnFormat) -> list[str]:
    """The marks around a thought that a vocabulary can have as one token each, which parsers look for."""
    marked = [] if form.reasoning is None else [form.reasoning.open, form.reasoning.close]
    return [mark for mark in marked if len(CutPoints().split(mark)) == 1]


def _content_open(form: TurnFormat) -> str:
    """The text between the close of a thought and a content."""
    assert form.reasoning is not None
    return form.content.open if form.content.open != form.reasoning.close else ""


def turns(form: TurnFormat) -> Iterator[Turn]:
    """Yield turns in the format, and some that deviate from it."""
    thought = form.reasoning
    assert thought is not None
    opened, close, said = thought.opened_by_prompt, thought.close, _content_open(form)
    opening = "" if opened else f"{thought.open}\n"
    two = "First this.\n\nThen that."
    yield Turn("reasoning and an answer", f"{opening}Well.\n{close}\n\n{said}Yes.", "Well.", "Yes.")
    yield Turn("paragraphs", f"{opening}{two}\n{close}\n\n{said}{two}", two, two)
    yield Turn("empty reasoning", f"{opening}\n{close}\n\n{said}Yes.", "", "Yes.")
    yield Turn("reasoning without an answer", f"{opening}Well.\n{close}", "Well.", "")
    again = f"A thought ends with {close} here."
    yield Turn("the closing mark in the answer", f"{opening}Well.\n{close}\n\n{said}{again}", "Well.", again)
    if thought.open:
        within = f"A thought begins with {thought.open} here."
        yield Turn("the opening mark in the reasoning", f"{opening}{within}\n{close}\n\n{said}Yes.", within, "Yes.")
    if thought.open or opened:
        yield Turn("reasoning that is cut", f"{opening}Well, it", "Well, it", "")
    if opened and thought.open:
        yield Turn("the opening mark again", f"{thought.open}\nWell.\n{close}\n\n{said}Yes.", "Well.", "Yes.")
    if not opened:
        yield Turn("an answer alone", f"{said}Yes.", "", "Yes.")
        yield Turn("a closing mark without an opening one", f"{close}\n\n{said}Yes.", "", "Yes.")
        if thought.open:
            prose = f"A thought begins with {thought.open} here."
            yield Turn("the opening mark in the answer", f"{said}{prose}", "", prose)


def play(group: Group) -> ThoughtRow:
    """Return the results of one group of templates."""
    # Imported here, since this takes seconds, and pages are built from records without it.
    from tests.conformance.peers.readers import reasoning_parsers, vllm_split

    entry, form = group.entry, turn_of(group.entry)
    assert form.reasoning is not None, "only marked thoughts are played"
    tokens = tuple(dict.fromkeys([*control_tokens_of(entry), *single_marks(form)]))
    prompt = FormatProber(entry.renderer(), CutPoints()).prompt() or ""
    trials = list(turns(form))
    found = {OURS: _misses(trials, prompt, _ours(form))}
    for names in reasoning_parsers():
        # Both with the template option that requests thoughts and without it. The better result counts.
        splits = [vllm_split(names, tokens, thinking=thinking) for thinking in (True, False)]
        misses = [_misses(trials, prompt, split) for split in splits if split is not None]
        if misses:
            found[names] = min(misses, key=len)
    right = [name for name, misses in found.items() if trials[0].what not in misses]
    ordered = sorted(right, key=lambda name: (name != OURS, len(found[name])))
    return ThoughtRow(
        template=entry.name,
        templates=group.templates,
        models=group.models,
        marks=marks(form),
        trials=len(trials),
        readers={name: found[name] for name in ordered},
    )


def _ours(form: TurnFormat) -> Split:
    reader = TurnReader(dataclasses.replace(form, calls=None))

    def split(prompt: str, text: str) -> tuple[str, str]:
        reading = reader.read(text)
        return reading.reasoning, reading.content

    return split


def _misses(trials: Iterable[Turn], prompt: str, split: Split) -> dict[str, str]:
    misses = {turn.what: _miss(turn, prompt, split) for turn in trials}
    return {what: miss.name for what, miss in misses.items() if miss is not None}


def _miss(turn: Turn, prompt: str, split: Split) -> Miss | None:
    try:
        thought, content = (part.strip() for part in split(prompt, turn.text))
    except Exception:  # an error of the parser becomes the error of the request
        return Miss.RAISES
    if (thought, content) == (turn.thought, turn.content):
        return None
    if turn.thought and turn.thought in content:
        return Miss.THOUGHT_SAID
    if turn.content and turn.content in thought:
        return Miss.CONTENT_THOUGHT
    if turn.thought and not thought:
        return Miss.THOUGHT_LOST
    return Miss.CONTENT_LOST if turn.content and not content else Miss.OTHER
