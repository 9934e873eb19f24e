"""Learnt formats of every template's turns: played over the corpus, kept as a record, written as a page."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runner.parsing.call_grammar import enforceable
from runner.parsing.call_reader import Schemas
from runner.parsing.cut_points import CutPoints
from runner.parsing.events import TurnReading
from runner.parsing.harmony import HarmonyStream, read_harmony
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.format_check import differences
from runner.parsing.learning.learnt_format import FormatVerdict, learn_format
from runner.parsing.learning.probe_renders import FormatProber
from runner.parsing.limitations import DESCRIPTIONS
from runner.parsing.streaming import TurnStream
from runner.parsing.turn_format import TurnFormat
from runner.parsing.turn_reader import TurnReader
from runner.tokens.tool_support import missing_tool_property
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import spread

__all__ = ["RECORD", "Row", "learn", "learn_all", "page", "recorded", "table", "write"]

RECORD = Path(__file__).with_name("turn_formats.txt")


@dataclass(frozen=True)
class Row:
    """Results of one template that can serve an environment with tools."""

    template: str
    verdict: str
    enforced: bool
    """True if a call can be required."""
    strict: bool
    """True if calls that the model begins by itself can be held to the schemas."""
    streamed: bool
    """True if every case of the battery reads the same piece by piece as at once."""
    traits: tuple[str, ...]
    missing: str
    thought: str
    """The marks around a thought, and the author of the opening one; "" if none is shown."""

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Learn a template."""
        learnt = learn_format(entry.renderer())
        calls, thought = learnt.format.calls, learnt.format.reasoning
        enforced = calls is not None and enforceable(calls) is None
        opened = "prompt" if thought and thought.opened_by_prompt else "model"
        return cls(
            entry.name,
            learnt.verdict,
            enforced,
            enforced and calls is not None and bool(calls.trigger),
            calls is not None and streams(entry, learnt.format),
            tuple(learnt.limitations),
            learnt.missing or "",
            f"{thought.open} {thought.close} {opened}".strip() if thought else "",
        )

    def line(self) -> str:
        """The row as the record has it."""
        held = {"enforced": self.enforced, "strict": self.strict, "streamed": self.streamed}
        marks = " ".join(name if holds else "-" for name, holds in held.items())
        return "\t".join([self.template, self.verdict, marks, ",".join(self.traits), self.missing, self.thought])

    @classmethod
    def read(cls, line: str) -> Self:
        """The row that `line` wrote."""
        template, verdict, marks, traits, missing, thought = line.rstrip("\n").split("\t")
        listed = tuple(traits.split(",")) if traits else ()
        held = ("enforced" in marks, "strict" in marks, "streamed" in marks)
        return cls(template, verdict, *held, listed, missing, thought)


def streams(entry: Entry, form: TurnFormat) -> bool:
    """True if a battery of turns reads the same in any pieces."""
    assert form.calls is not None
    prober = FormatProber(entry.renderer(), CutPoints())
    if not form.harmony:
        learn_calls(prober)  # it finds what the template wants around a call
    reader, source = TurnReader(form), random.Random(entry.name)

    def at_once(text: str, schemas: Schemas) -> TurnReading:
        return read_harmony(text) if form.harmony else reader.read(text, schemas)

    def in_pieces(text: str, schemas: Schemas) -> TurnReading:
        stream = HarmonyStream() if form.harmony else TurnStream(reader, schemas)
        while text:
            length = source.randint(1, 7)
            stream.feed(text[:length])
            text = text[length:]
        stream.finish()
        return stream.reading

    whole, pieces = (differences(prober, form.calls, read) for read in (at_once, in_pieces))
    return whole == pieces


def capable() -> list[Entry]:
    """The templates that show tools, calls and results."""
    return [entry for entry in corpus() if missing_tool_property(entry.renderer()) is None]


def learn(entry: Entry) -> Row:
    """Results of one template."""
    return Row.of(entry)


def learn_all(processes: int = 2) -> list[Row]:
    """Results of all templates that can serve an environment with tools."""
    return spread(learn, capable(), processes)


def recorded() -> list[Row]:
    """The recorded results."""
    return [Row.read(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def write(rows: Iterable[Row]) -> None:
    """Keep what came of them."""
    RECORD.write_text("".join(f"{row.line()}\n" for row in rows), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """The generated page, docs/tool-formats.md."""
    entries = {entry.name: entry for entry in corpus()}
    models = {row.template: len(entries[row.template].models) for row in rows}
    usable = [row for row in rows if row.verdict != FormatVerdict.REFUSED]
    families = sorted({entries[row.template].family for row in rows}, key=str.lower)
    return "\n".join([
        "# Tool calls and reasoning by template",
        "",
        "Written by `python -m tests.conformance --formats --write`; tests compare it with a fresh run.",
        "",
        f"{_count(rows, models)} show tools, calls and results.",
        "deltarunner learns the format of calls and reasoning from renders of each template. It then checks the format",
        "with other calls: every type of value, awkward strings, names with punctuation, no arguments, several calls,",
        "and content beside calls. The text that the format writes must be in the render, character for character.",
        "",
        "- *exact*: all calls are read exactly, with any values.",
        "- *limited*: calls are read exactly, but for the limits that are listed under [traits](#traits).",
        "- *refused*: calls cannot be read. The error names the property that is missing.",
        "- *enforced*: the model can be made to write a call (`tool_choice=\"required\"`).",
        "- *strict*: the arguments follow the tool's schema also where the model chooses whether to call.",
        "- *streamed*: calls are read the same if the text arrives in pieces.",
        "- *reasoning*: the template marks reasoning.",
        "",
        f"{_count(usable, models)} can be used with tools.",
        f"{_count([row for row in rows if row.enforced], models)} are *enforced*.",
        f"{_count([row for row in rows if row.strict], models)} are *strict*.",
        f"{_count([row for row in rows if row.streamed], models)} are *streamed*.",
        "",
        "## By family, templates / models",
        "",
        *table(["family", "exact", "limited", "refused", "enforced", "strict", "streamed", "reasoning"], [
            (family, *_counts([row for row in rows if entries[row.template].family == family], models))
            for family in families
        ] + [("all", *_counts(rows, models))]),
        "",
        "## Traits",
        "",
        *table(["trait", "templates / models", "what it means"], [
            (trait, _share([row for row in rows if trait in row.traits], models), sentence)
            for trait, sentence in DESCRIPTIONS.items()
        ]),
        "",
        "## Refused, by property",
        "",
        *table(["property", "templates / models"], [
            (missing, _share([row for row in rows if row.missing == missing], models))
            for missing, _ in Counter(row.missing for row in rows if row.missing).most_common()
        ]),
        "",
        "## Marks of reasoning",
        "",
        *table(["opening mark", "closing mark", "written by", "templates / models"], [
            (*_cells(thought), _share([row for row in rows if row.thought == thought], models))
            for thought, _ in Counter(row.thought for row in rows if row.thought).most_common()
        ]),
        "",
    ])  # fmt: skip


def _cells(thought: str) -> tuple[str, str, str]:
    *opening, closing, who = thought.split(" ")
    return (f"`{' '.join(opening)}`" if opening else "nothing"), f"`{closing}`", f"the {who}"


def _counts(rows: Sequence[Row], models: dict[str, int]) -> list[str]:
    chosen = [[row for row in rows if row.verdict == verdict] for verdict in FormatVerdict]
    chosen += [[row for row in rows if getattr(row, held)] for held in ("enforced", "strict", "streamed")]
    return [_share(some, models) for some in (*chosen, [row for row in rows if row.thought])]


def _share(rows: Sequence[Row], models: dict[str, int]) -> str:
    return f"{len(rows)} / {sum(models[row.template] for row in rows)}" if rows else ""


def _count(rows: Sequence[Row], models: dict[str, int]) -> str:
    return f"{len(rows)} templates of {sum(models[row.template] for row in rows):,} models"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
