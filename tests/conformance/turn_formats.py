"""Learnt formats of every template's turns: played over the corpus, saved as a record, written as a page."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from runner.parsing.call_grammar import enforceable
from runner.parsing.call_reader import Schemas
from runner.parsing.cut_points import CutPoints
from runner.parsing.events import TurnReading
from runner.parsing.harmony import HarmonyStream, read_harmony
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.format_check import differences
from runner.parsing.learning.learnt_format import FormatVerdict, learn_format
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement
from runner.parsing.limitations import DESCRIPTIONS
from runner.parsing.streaming import TurnStream
from runner.parsing.turn_format import TurnFormat
from runner.parsing.turn_reader import TurnReader
from runner.tokens.tool_support import missing_tool_property
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import spread

__all__ = ["RECORD", "Row", "learn", "learn_all", "page", "recorded", "write"]

RECORD = Path(__file__).with_name("turn_formats.txt")

BETWEEN_MARKS: Final = " .. "
"""Separator in `Row.thought`. A mark may contain spaces."""

INTRODUCTION: Final = """# Tool calls and reasoning by template

Written by `python -m tests.conformance --formats --write`; tests compare it with a fresh run.

A chat template writes the calls of an assistant turn in a format of its own. deltarunner learns this format from
renders: texts that the template writes for given messages. It then checks the format with other calls: every type of
value, strings with quotes, line breaks and code, names with punctuation, no arguments, several calls, and text beside
calls. In each of these checks, the text that deltarunner writes for a call must be in the render, character for
character.

{all} show the definitions of tools, calls and results. This page has the
results for these templates. Two other pages count fewer such templates:
[Conformance](conformance.md#tool-arguments-that-templates-show) has no template that raises an error for an argument
that is not a text, and [Chat templates](chat-templates.md#how-common-each-is) no template that raises an error for a
conversation without tools.

The words of the results are:

- *exact*: deltarunner reads all calls exactly, with any values.
- *limited*: it reads calls exactly, apart from the [limitations](#limitations) of the template.
- *refused*: it cannot read the calls. An environment with tools is refused, and the error names the missing property.
- *enforced*: the model can be forced to write a call (`tool_choice="required"`).
- *strict*: the model may choose between text and a call. The arguments of its calls then always follow the schema of
  the tool (`@tool(strict=True)`).
- *streamed*: calls are read in the same way if the text arrives in pieces.
- *reasoning*: the template writes marks around reasoning. A *mark* is a fixed text of a format, such as `<think>` or
  `<tool_call>`.
"""

MEANINGS: Final[Mapping[str, str]] = {
    FormatRequirement.SHOWN: "The template writes the name and the arguments of a call.",
    FormatRequirement.SEPARABLE: "The beginning and the end of a call can be found in the text.",
    FormatRequirement.VALUES: "Each type of value is written in a form that can be read.",
    FormatRequirement.REPEATED: "A second call is written like the first one.",
    FormatRequirement.INVERTED: "The calls that the template writes are read back with the same values.",
    FormatRequirement.BOUNDED: "The format can be learnt with a limited number of renders.",
}
"""The meaning of each property that a template must have so that its calls can be read."""


@dataclass(frozen=True)
class Row:
    """Results of one template that can serve an environment with tools."""

    template: str
    verdict: str
    enforced: bool
    """True if a call can be required."""
    strict: bool
    """True if calls that the model begins by itself can be constrained to the schemas."""
    streamed: bool
    """True if reading every case of the battery piece by piece has the same result as reading it at once."""
    limitations: tuple[str, ...]
    missing: str
    thought: str
    """The opening mark of reasoning, the closing mark, and the author of the opening mark, with `BETWEEN_MARKS` between
    them; "" if the template shows no reasoning."""

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Learn the formats of a template."""
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
            BETWEEN_MARKS.join([thought.open, thought.close, opened]) if thought else "",
        )

    def line(self) -> str:
        """Return the row as one line of the record."""
        held = {"enforced": self.enforced, "strict": self.strict, "streamed": self.streamed}
        marks = " ".join(name if holds else "-" for name, holds in held.items())
        return "\t".join([self.template, self.verdict, marks, ",".join(self.limitations), self.missing, self.thought])

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the row in a line of the record."""
        template, verdict, marks, limitations, missing, thought = line.rstrip("\n").split("\t")
        listed = tuple(limitations.split(",")) if limitations else ()
        held = ("enforced" in marks, "strict" in marks, "streamed" in marks)
        return cls(template, verdict, *held, listed, missing, thought)


def streams(entry: Entry, form: TurnFormat) -> bool:
    """True if a battery of turns has the same result in any pieces."""
    assert form.calls is not None
    prober = FormatProber(entry.renderer(), CutPoints())
    if not form.harmony:
        learn_calls(prober)  # it finds the context that the template needs around a call
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
    """Return the results of one template."""
    return Row.of(entry)


def learn_all(processes: int = 2) -> list[Row]:
    """Return the results of all templates that can serve an environment with tools."""
    return spread(learn, capable(), processes)


def recorded() -> list[Row]:
    """Return the recorded results."""
    return [Row.read(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def write(rows: Iterable[Row]) -> None:
    """Save the results."""
    RECORD.write_text("".join(f"{row.line()}\n" for row in rows), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """Return the generated page, docs/tool-formats.md."""
    entries = {entry.name: entry for entry in corpus()}
    models = {row.template: len(entries[row.template].models) for row in rows}
    usable = [row for row in rows if row.verdict != FormatVerdict.REFUSED]
    families = sorted({entries[row.template].family for row in rows}, key=str.lower)
    return "\n".join([
        INTRODUCTION.format(all=_count(rows, models)),
        f"{_count(usable, models)} can be used with tools: they are *exact* or *limited*.",
        f"{_count([row for row in rows if row.enforced], models)} are *enforced*,",
        f"{_count([row for row in rows if row.strict], models)} are *strict*, and",
        f"{_count([row for row in rows if row.streamed], models)} are *streamed*.",
        "",
        "## Results by family",
        "",
        "A cell has the number of templates and, after the slash, the number of models that use them. An empty cell",
        "means 0.",
        "",
        *_table(["family", "exact", "limited", "refused", "enforced", "strict", "streamed", "reasoning"], [
            (family, *_counts([row for row in rows if entries[row.template].family == family], models))
            for family in families
        ] + [("all", *_counts(rows, models))]),
        "",
        "## Limitations",
        "",
        "`deltarunner check-template` prints the limitations of a template.",
        "",
        *_table(["limitation", "templates / models", "meaning"], [
            (limitation, _share([row for row in rows if limitation in row.limitations], models), sentence)
            for limitation, sentence in DESCRIPTIONS.items()
        ]),
        "",
        "## Refused templates by missing property",
        "",
        *_table(["missing property", "templates / models", "meaning"], [
            (missing, _share([row for row in rows if row.missing == missing], models), MEANINGS[missing])
            for missing, _ in Counter(row.missing for row in rows if row.missing).most_common()
        ]),
        "",
        "## Marks of reasoning",
        "",
        "If the prompt has the opening mark, the model begins with its reasoning and writes only the closing mark.",
        "",
        *_table(["opening mark", "closing mark", "the opening mark is written by", "templates / models"], [
            (*_cells(thought), _share([row for row in rows if row.thought == thought], models))
            for thought, _ in Counter(row.thought for row in rows if row.thought).most_common()
        ]),
        "",
    ])  # fmt: skip


def _cells(thought: str) -> tuple[str, str, str]:
    opening, closing, who = thought.split(BETWEEN_MARKS)
    return (f"`{opening}`", f"`{closing}`", f"the {who}") if opening else ("none", f"`{closing}`", "")


def _counts(rows: Sequence[Row], models: dict[str, int]) -> list[str]:
    chosen = [[row for row in rows if row.verdict == verdict] for verdict in FormatVerdict]
    chosen += [[row for row in rows if getattr(row, held)] for held in ("enforced", "strict", "streamed")]
    return [_share(some, models) for some in (*chosen, [row for row in rows if row.thought])]


def _share(rows: Sequence[Row], models: dict[str, int]) -> str:
    return f"{len(rows)} / {sum(models[row.template] for row in rows)}" if rows else ""


def _count(rows: Sequence[Row], models: dict[str, int]) -> str:
    return f"{len(rows)} templates ({sum(models[row.template] for row in rows):,} models)"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
