"""The page about vLLM's parsers, docs/tool-parsers.md, made of the records alone."""

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
    Kind.UNOPENED: "by choice: the trigger makes a call, and without it nothing is silently a call",
    Kind.MENTIONED: "by choice: a mark sampled as its own token, or one that is not a token, makes a call, which is "
    "reported as unreadable; in letters it is content",
    Kind.OPEN_ARGUMENT: "by the template: it writes one string with the rest in this way",
    Kind.WORDS_AFTER: "by choice: without a trigger, text is a call only if the turn ends with it",
    Kind.FENCED: "not tolerated: the model reads that no value begins there",
    Kind.TOGETHER: "not tolerated: the model reads that the close is missing",
    Kind.LISTED: "not tolerated: the model reads that a call must be an object",
    Kind.UNLISTED: "not tolerated: the model reads how calls begin; without a trigger, it is content",
    Kind.SQUEEZED: "not tolerated: the words of the trigger are written without the space between them",
}
"""The reason for our reading, for every kind in which a parser of vLLM's reads better what some format has."""


@dataclass(frozen=True, slots=True)
class Case:
    """One trial of one format, as two readers had it."""

    kind: Kind
    ours: Fault | None
    theirs: Fault | None

    @property
    def better(self) -> int:
        """More than 0 where ours is better, less where theirs is."""
        return _rank(self.theirs) - _rank(self.ours)


def _rank(fault: Fault | None) -> int:
    return 0 if fault is None else 1 if fault in SLIGHT else 2


def _cases(row: CallRow, reader: str) -> Iterator[Case]:
    """The trials in which at least one of ours and a reader is wrong."""
    ours, theirs = row.readers[OURS], row.readers[reader]
    for kind in row.trials:
        mine, its = ours.get(kind, {}), theirs.get(kind, {})
        for what in {**mine, **its}:
            found = [Fault[faults[what]] if what in faults else None for faults in (mine, its)]
            yield Case(Kind[kind], *found)


def better_kinds(rows: Iterable[CallRow]) -> dict[Kind, Counter[str]]:
    """The kinds in which a parser of vLLM's is better than ours in some format, with the formats of each parser."""
    found: dict[Kind, Counter[str]] = {}
    for row in rows:
        for reader in row.readers:
            for kind in {case.kind for case in _cases(row, reader) if case.better < 0}:
                found.setdefault(kind, Counter())[reader] += 1
    return {kind: found[kind] for kind in Kind if kind in found}


def write_about(marks: Collection[str]) -> None:
    """Keep which vLLM it was, where thoughts have only these marks."""
    from tests.conformance.peers.readers import about  # here, since it takes seconds

    ABOUT.write_text(json.dumps(about(marks), indent=2) + "\n", encoding="utf-8")


def page(calls: Sequence[CallRow], thoughts: Sequence[ThoughtRow]) -> str:
    """The generated page."""
    read, unread = ([row for row in calls if (row.best is None) is none] for none in (False, True))
    return "\n".join([
        "# vLLM's tool parsers beside ours",
        "",
        "Written by `python -m tests.conformance --peers --write`; tests compare it with a fresh run.",
        "",
        *_introduction(calls),
        "",
        "## In short",
        "",
        *_in_short(calls, read, unread),
        "",
        "## Kind by kind",
        "",
        "Ours beside the best of vLLM's parsers for each format that one of them reads: how many trials each had",
        "wrong, and in how many the other one was better.",
        "",
        "As templates write:",
        "",
        *table(_KINDS, _kinds(read, as_written=True)),
        "",
        "As models stray:",
        "",
        *table(_KINDS, _kinds(read, as_written=False)),
        "",
        "## Where a parser of vLLM's is better",
        "",
        "In any format, with any of its parsers. `llama3_json` reads every JSON object of a text as a call, even in an",
        "answer.",
        "",
        *table(("kind", "parsers, with their formats", "ours"), _better(calls)),
        "",
        "## Format by format",
        "",
        "The template of most models stands for all that write alike. The best parser comes first; of what is right of",
        "all, ours stands above and the best parser's below. Then who is right where they differ, and what the other",
        "one does.",
        "",
        *table(_FORMATS, map(_format, read)),
        "",
        "## Read by no parser that was tried",
        "",
        "gpt-oss and Command have parsers among those that were not.",
        "",
        *table(("template", "templates / models", "one call", "as written", "strayed"), map(_unread, unread)),
        "",
        "## Parser by parser",
        "",
        "Share of right readings, over the formats of which it reads a plain call.",
        "",
        *table(("parser", "formats", "the best for", "as written", "strayed", "wrong as written"), _parsers(calls)),
        "",
        "## Thoughts",
        "",
        f"Both parsers find the end of a thought for the {len(thoughts)} ways in which templates mark it, gpt-oss left",
        "out: turns with a thought and an answer, with one of them, cut, and with the marks in prose. Each of vLLM's",
        "parsers was tried with the options that ask a template for thoughts, and without; the better counts.",
        "",
        *table(_THOUGHTS, map(_thought, thoughts)),
        "",
    ])  # fmt: skip


_KINDS: Final = ("kind", "trials", "ours wrong", "theirs wrong", "ours better", "theirs better", "what is wrong there")
_FORMATS: Final = (
    "template",
    "templates / models",
    "parsers",
    "as written",
    "strayed",
    "ours is right",
    "theirs is right",
)
_THOUGHTS: Final = ("a thought", "templates / models", "ours wrong", "parsers, the best first", "it has wrong", "which")


def _introduction(calls: Sequence[CallRow]) -> list[str]:
    about = json.loads(ABOUT.read_text(encoding="utf-8"))
    tried = sum(len(names.split(", ")) for names in about["tool_parsers"])
    return [
        "vLLM reads tool calls with a parser that is chosen by name. Here the format of calls is learnt from the",
        f"chat template. The {len(calls)} distinct formats of {_share(calls)} were read by both,",
        f"with vLLM {about['vllm']}.",
        "",
        "- *as written*: every case of the check of learnt formats, some more about schemas and",
        "  ids, and answers without a call. The text is the template's own.",
        "- *strayed*: known deviations of models from their template, as far as a format can have them. Each one",
        "  counts once, however frequent it is.",
        "- A reading is right if it has **the original call**: names, arguments with their types, the exact content;",
        "  or if the template writes the same text for what was read, and the schemas allow it. The tools' schemas",
        "  have a type for every argument. If both are wrong, the one with the right calls is better.",
        "- Parsers are called like in vLLM's server, for a complete turn, with a vocabulary of bytes and the control",
        f"  tokens of the template. Each of {tried} that reads one plain call right was given everything, and the best",
        "  is the one with the fewest faults.",
        "",
        "Not tried:",
        "",
        *(f"- `{name}` {why}" for name, why in NOT_TRIED.items() if name in about["registered"]),
        *(f"- `{name}` for thoughts: needs tokens that no template here has" for name in about["unfit"]),
    ]


def _in_short(calls: Sequence[CallRow], read: Sequence[CallRow], unread: Sequence[CallRow]) -> list[str]:
    def compared(what: str, *, as_written: bool) -> tuple[str, ...]:
        more = [
            row.wrong(row.best or OURS, as_written=as_written) - row.wrong(OURS, as_written=as_written) for row in read
        ]
        groups = ([row for row, many in zip(read, more, strict=True) if sign(many)] for sign in _SIGNS)
        return what, *map(_formats, groups)

    written, strayed = (_of_all(calls, OURS, as_written=as_written) for as_written in (True, False))
    return [
        f"{_formats(unread)} are read by no parser that was tried. Of the others the best parser of vLLM's has",
        "",
        *table(
            ("", "more wrong than ours", "as many", "fewer"),
            [compared("as written", as_written=True), compared("strayed", as_written=False)],
        ),
        "",
        f"Ours reads {written} right as templates write them, and {strayed} that strayed.",
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
        counts = (_counted("theirs", [case.theirs for case in ours]), _counted("ours", [case.ours for case in theirs]))
        yield kind, trials, *(number or "" for number in numbers), "; ".join(filter(None, counts))


def _counted(whose: str, faults: Sequence[Fault | None]) -> str:
    """The readers of these faults, and the number of each."""
    counted = ", ".join(f"{fault} {number}" for fault, number in Counter(faults).most_common())
    return f"{whose} {counted}" if faults else ""


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
    """`text` as a code span of Markdown in one line; spaces keep its own backticks apart from the span's."""
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
    """The right readings of a reader, of all trials of these formats."""
    tried = sum(row.tried(as_written=as_written) for row in rows)
    return f"{tried - sum(row.wrong(reader, as_written=as_written) for row in rows):,} of {tried:,}"


def _formats(rows: Sequence[CallRow]) -> str:
    return f"{len(rows)} formats ({_share(rows)})" if rows else "none"


def _share(rows: Sequence[CallRow]) -> str:
    return f"{sum(row.templates for row in rows)} templates, {sum(row.models for row in rows):,} models"
