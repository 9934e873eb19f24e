"""The page about vLLM's parsers, docs/tool-parsers.md, built from the records alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conformance.peers.calls import OURS, CallRow
from tests.conformance.peers.cases import NOT_TRIED, Kind
from tests.conformance.peers.judging import SLIGHT, Fault
from tests.conformance.peers.thoughts import Miss, ThoughtRow
from tests.conformance.turn_formats import table

__all__ = ["ABOUT", "BETTER", "better_kinds", "page", "write_about"]

ABOUT: Final = Path(__file__).with_name("vllm.json")
"""vLLM's version, and the names of its parsers."""

BETTER: Final[Mapping[Kind, str]] = {
    Kind.UNOPENED: "by choice: without the opening mark, text is not a call",
    Kind.MENTIONED: "by choice: the opening mark starts a call if it is one token, or if the vocabulary has no token "
    "for it. If the text after it cannot be read, it is a call with an error. The mark in several tokens is content",
    Kind.OPEN_ARGUMENT: "the template writes the same text for one string that contains the rest of the call",
    Kind.WORDS_AFTER: "by choice: in a format without an opening mark, text is a call only if the turn ends with it",
    Kind.FENCED: "a call with an error: no value begins at the fence",
    Kind.TOGETHER: "a call with an error: the closing mark of the first call is missing",
    Kind.LISTED: "a call with an error: a call must be an object",
    Kind.UNLISTED: "a call with an error, since the list is missing; in a format without an opening mark, the text "
    "is content",
    Kind.SQUEEZED: "the opening mark has a space in it; without this space, it is not the mark",
}
"""The reason for our reading, for every kind in which a parser of vLLM's is better in some format."""


@dataclass(frozen=True, slots=True)
class Case:
    """The faults of two readers in one trial of one format."""

    kind: Kind
    ours: Fault | None
    theirs: Fault | None

    @property
    def better(self) -> int:
        """Positive if our reader is better, negative if the other reader is better."""
        return _rank(self.theirs) - _rank(self.ours)


def _rank(fault: Fault | None) -> int:
    return 0 if fault is None else 1 if fault in SLIGHT else 2


def _cases(row: CallRow, reader: str) -> Iterator[Case]:
    """Yield the trials in which our reader, the other reader or both are wrong."""
    ours, theirs = row.readers[OURS], row.readers[reader]
    for kind in row.trials:
        mine, its = ours.get(kind, {}), theirs.get(kind, {})
        for what in {**mine, **its}:
            found = [Fault[faults[what]] if what in faults else None for faults in (mine, its)]
            yield Case(Kind[kind], *found)


def better_kinds(rows: Iterable[CallRow]) -> dict[Kind, Counter[str]]:
    """The kinds in which a parser of vLLM's is better than ours in some format, with the number of formats."""
    found: dict[Kind, Counter[str]] = {}
    for row in rows:
        for reader in row.readers:
            for kind in {case.kind for case in _cases(row, reader) if case.better < 0}:
                found.setdefault(kind, Counter())[reader] += 1
    return {kind: found[kind] for kind in Kind if kind in found}


def write_about(marks: Collection[str]) -> None:
    """Save the version of vLLM and its parsers, for thoughts with these marks."""
    from tests.conformance.peers.readers import about  # imported here, since this takes seconds

    ABOUT.write_text(json.dumps(about(marks), indent=2) + "\n", encoding="utf-8")


def page(calls: Sequence[CallRow], thoughts: Sequence[ThoughtRow]) -> str:
    """The generated page."""
    read, unread = ([row for row in calls if (row.best is None) is none] for none in (False, True))
    return "\n".join([
        "# vLLM's tool parsers compared with deltarunner",
        "",
        "Written by `python -m tests.conformance --peers --write`; tests compare it with a fresh run.",
        "",
        *_introduction(calls),
        "",
        "## In short",
        "",
        *_in_short(calls, read, unread),
        "",
        "## Results by kind of trial",
        "",
        f"These tables are about the {len(read)} formats that at least one of vLLM's parsers reads. In each format,",
        "deltarunner is compared with the best parser. *Wrong* is the number of trials that a reader reads wrong,",
        "*better* the number of trials in which its reading is better. The last column has the faults of the other",
        "reading in these trials. An empty cell means 0.",
        "",
        "Text as templates write it:",
        "",
        *table(_KINDS, _kinds(read, as_written=True)),
        "",
        "Text that deviates from the template:",
        "",
        *table(_KINDS, _kinds(read, as_written=False)),
        "",
        "## Where a parser of vLLM's is better",
        "",
        "The table has each kind of trial in which at least one of vLLM's parsers, not only the best one, reads some",
        "format better than deltarunner. `llama3_json` reads every JSON object as a call, so it finds calls without",
        "marks, but also takes JSON in an answer for a call.",
        "",
        *table(("kind", "parsers, each with its number of formats", "reason of deltarunner's reading"), _better(calls)),
        "",
        "## Results by format",
        "",
        "A row is a format. It has the name of one template, the one that most models use, and the number of all",
        "templates with this format and of their models. The best parser of vLLM's comes first in its column. A cell",
        "with two lines has the number of right readings: first of deltarunner, then of the best parser. The last two",
        "columns compare these two: they have the faults of the worse reading, each with its kinds of trial.",
        "",
        *table(_FORMATS, map(_format, read)),
        "",
        "## Formats that no tested parser reads",
        "",
        "vLLM has parsers for gpt-oss and Command, but they were [not tested](#parsers-that-were-not-tested). The",
        "results are those of deltarunner.",
        "",
        *table(("template", "templates / models", "one call", "as written", "deviating"), map(_unread, unread)),
        "",
        "## Results by parser",
        "",
        "A row is a parser of vLLM's, with its right readings in all formats that it reads.",
        "",
        *table(_PARSERS, _parsers(calls)),
        "",
        "## Reasoning",
        "",
        f"The templates mark reasoning in {len(thoughts)} ways; gpt-oss is left out. Each way was tested with turns",
        "that have reasoning and an answer, with turns that have only one of these, with turns that are cut in the",
        "reasoning, and with turns that have the marks in ordinary text. Each of vLLM's parsers was tested with and",
        "without the options that request reasoning from a template, and the better result counts. The table has the",
        "parsers that read the first of these turns right.",
        "",
        "The first column has the opening mark, its author (the model, or the prompt if the template writes it there),",
        "the closing mark, and the mark before the answer if there is one.",
        "",
        *table(_THOUGHTS, map(_thought, thoughts)),
        "",
    ])  # fmt: skip


_KINDS: Final = (
    "kind",
    "trials",
    "deltarunner wrong",
    "vLLM wrong",
    "deltarunner better",
    "vLLM better",
    "faults of the worse reading",
)
_FORMATS: Final = (
    "template",
    "templates / models",
    "parsers",
    "as written",
    "deviating",
    "faults of the best parser where deltarunner is better",
    "faults of deltarunner where the best parser is better",
)
_PARSERS: Final = (
    "parser",
    "formats that it reads",
    "formats in which it is vLLM's best",
    "as written",
    "deviating",
    "kinds of trial that it reads wrong in text as written",
)
_THOUGHTS: Final = (
    "marks of reasoning",
    "templates / models",
    "deltarunner wrong",
    "vLLM's parsers, the best first",
    "the best parser wrong",
    "faults of the best parser",
)


def _introduction(calls: Sequence[CallRow]) -> list[str]:
    about = json.loads(ABOUT.read_text(encoding="utf-8"))
    tried = sum(len(names.split(", ")) for names in about["tool_parsers"])
    return [
        "vLLM reads tool calls with a parser that the user chooses by name. deltarunner learns the format of calls",
        f"from the chat template. Both were tested on {len(calls)} different formats ({_share(calls)}). The",
        f"version of vLLM is {about['vllm']}.",
        "",
        "The words of this page:",
        "",
        "- A *mark* is a fixed text of a format, such as `<tool_call>`. The *section* is the part of a turn between",
        "  the first and the last mark of its calls. *Content* is the text of a turn beside its calls.",
        "- A *trial* is one text that all readers get: deltarunner, and the parsers that read the format.",
        "- *As written*: the template itself writes the text. These trials are all cases with which deltarunner",
        "  checks a learnt format, some more about schemas and call ids, and answers without a call.",
        "- *Deviating*: the text deviates from the template in a way that is known of models. A format has only the",
        "  trials that are possible in it, and each way is one trial, however often models deviate in this way.",
        "- A reading is *right* if it returns the original call: name, arguments with their types, and the exact",
        "  content. Sometimes a template writes the same text for two different calls. In text as written both are",
        "  right if the schemas allow them. The schemas have a type for every argument, except in the trials about",
        "  schemas.",
        "- A reading is *better* than another if it is right and the other is wrong. If both are wrong, the one whose",
        "  calls are right is better.",
        "- A *call with an error* is a call that cannot be read. The model gets the error as the result of the call.",
        "- A parser *reads* a format if it reads a plain call of the format right. If no parser does, those parsers",
        "  count whose only fault is in the content. A parser gets all trials of the formats that it reads. The *best",
        "  parser* of a format has the fewest faults in text as written.",
        "",
        "Each parser is called as in vLLM's server, for the text of a whole turn. The test vocabulary has all bytes",
        f"and the control tokens of the template. {tried} names of parsers were tested. Names of the same parser are",
        "together, as in `hermes, qwen3_json`.",
        "",
        "## Parsers that were not tested",
        "",
        *(f"- `{name}` {why}" for name, why in NOT_TRIED.items() if name in about["registered"]),
        *(f"- `{name}` for reasoning: it needs tokens that none of these templates has" for name in about["unfit"]),
    ]


def _in_short(calls: Sequence[CallRow], read: Sequence[CallRow], unread: Sequence[CallRow]) -> list[str]:
    def compared(what: str, *, as_written: bool) -> tuple[str, ...]:
        more = [
            row.wrong(row.best or OURS, as_written=as_written) - row.wrong(OURS, as_written=as_written) for row in read
        ]
        groups = ([row for row, many in zip(read, more, strict=True) if sign(many)] for sign in _SIGNS)
        return what, *map(_formats, groups)

    written, deviating = (_of_all(calls, OURS, as_written=as_written) for as_written in (True, False))
    return [
        f"No tested parser reads {_formats(unread)}. In each of the other formats, the best parser is compared with",
        "deltarunner. The table has the number of formats in which the best parser makes more, as many, or fewer",
        "faults:",
        "",
        *table(
            ("text", "more faults than deltarunner", "as many faults", "fewer faults"),
            [compared("as written", as_written=True), compared("deviating", as_written=False)],
        ),
        "",
        f"In all {len(calls)} formats together, deltarunner reads {written} texts right as written, and {deviating}",
        "deviating texts.",
    ]


_SIGNS: Final[Sequence[Callable[[int], bool]]] = (lambda n: n > 0, lambda n: n == 0, lambda n: n < 0)


def _kinds(rows: Sequence[CallRow], *, as_written: bool) -> Iterator[Sequence[object]]:
    found: dict[Kind, list[Case]] = {}
    for row in rows:
        for case in _cases(row, row.best or OURS):
            found.setdefault(case.kind, []).append(case)
    for kind in Kind:
        trials = sum(row.trials.get(kind.name, 0) for row in rows)
        if kind.is_written is not as_written or not trials:
            continue
        cases = found.get(kind, [])
        ours, theirs = [case for case in cases if case.better > 0], [case for case in cases if case.better < 0]
        numbers = (
            sum(case.ours is not None for case in cases),
            sum(case.theirs is not None for case in cases),
            len(ours),
            len(theirs),
        )
        counts = (
            _counted("vLLM", [case.theirs for case in ours]),
            _counted("deltarunner", [case.ours for case in theirs]),
        )
        yield kind, trials, *(number or "" for number in numbers), "; ".join(filter(None, counts))


def _counted(whose: str, faults: Sequence[Fault | None]) -> str:
    """The readers with these faults, and the number of each."""
    counted = ", ".join(f"{fault} {number}" for fault, number in Counter(faults).most_common())
    return f"{whose}: {counted}" if faults else ""


def _better(calls: Sequence[CallRow]) -> Iterator[Sequence[object]]:
    for kind, found in better_kinds(calls).items():
        yield kind, ", ".join(f"`{name}` {number}" for name, number in found.most_common()), BETTER.get(kind, "")


def _format(row: CallRow) -> Sequence[object]:
    best = row.best or OURS
    cases = list(_cases(row, best))
    names = [f"`{name}`" for name in row.readers if name != OURS]
    rights = [
        "<br>".join(_of_all([row], name, as_written=as_written) for name in (OURS, best))
        for as_written in (True, False)
    ]
    ours = _by_fault((case.theirs, case.kind) for case in cases if case.better > 0)
    theirs = _by_fault((case.ours, case.kind) for case in cases if case.better < 0)
    return row.template, f"{row.templates} / {row.models}", ", ".join(names), *rights, ours, theirs


def _by_fault(found: Iterable[tuple[Fault | None, Kind]]) -> str:
    """The kinds in which the other reader has each fault."""
    grouped: dict[Fault, dict[Kind, None]] = {}
    for fault, kind in found:
        if fault is not None:
            grouped.setdefault(fault, {})[kind] = None
    return "; ".join(f"*{fault}*: {', '.join(kinds)}" for fault, kinds in sorted(grouped.items()))


def _unread(row: CallRow) -> Sequence[object]:
    rights = [_of_all([row], OURS, as_written=as_written) for as_written in (True, False)]
    return row.template, f"{row.templates} / {row.models}", _code(row.shown), *rights


def _code(text: str) -> str:
    """Return `text` as a code span of Markdown in one line. Spaces separate its own backticks from the span's."""
    line = text.replace("\n", "⏎")
    return f"` {line} `" if "`" in (line[:1], line[-1:]) else f"`{line}`"


def _parsers(rows: Sequence[CallRow]) -> Iterator[Sequence[object]]:
    for name in sorted({reader for row in rows for reader in row.readers} - {OURS}):
        its = [row for row in rows if name in row.readers]
        rights = [_of_all(its, name, as_written=as_written) for as_written in (True, False)]
        wrong: Counter[Kind] = Counter()
        for row in its:
            wrong.update({Kind[kind]: len(cases) for kind, cases in row.readers[name].items() if Kind[kind].is_written})
        counts = ", ".join(f"{kind} {number}" for kind, number in wrong.most_common())
        yield f"`{name}`", len(its), sum(row.best == name for row in its) or "", *rights, counts


def _thought(row: ThoughtRow) -> Sequence[object]:
    names = [name for name in row.readers if name != OURS]
    best = row.readers[names[0]] if names else {}
    grouped: dict[str, list[str]] = {}
    for what, miss in best.items():
        grouped.setdefault(Miss[miss], []).append(what)
    return (
        row.marks,
        f"{row.templates} / {row.models}",
        f"{len(row.readers[OURS])} of {row.trials}",
        ", ".join(f"`{name}`" for name in names) or "none",
        f"{len(best)} of {row.trials}" if names else "",
        "; ".join(f"*{miss}*: {', '.join(cases)}" for miss, cases in grouped.items()),
    )


def _of_all(rows: Sequence[CallRow], reader: str, *, as_written: bool) -> str:
    """The correct readings of a reader, of all trials of these formats."""
    tried = sum(row.tried(as_written=as_written) for row in rows)
    return f"{tried - sum(row.wrong(reader, as_written=as_written) for row in rows):,} of {tried:,}"


def _formats(rows: Sequence[CallRow]) -> str:
    return f"{len(rows)} formats ({_share(rows)})" if rows else "none"


def _share(rows: Sequence[CallRow]) -> str:
    return f"{sum(row.templates for row in rows)} templates, {sum(row.models for row in rows):,} models"
