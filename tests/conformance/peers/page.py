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
    Kind.UNOPENED: "by choice: only the opening mark makes a call",
    Kind.MENTIONED: "by choice: an opening mark makes a call if it is one token, or if the vocabulary has no token for "
    "it; the model is told that the call cannot be read. The same mark in several tokens is content",
    Kind.OPEN_ARGUMENT: "the template writes a string that contains the rest in the same way",
    Kind.WORDS_AFTER: "by choice: in a format without an opening mark, text is a call only if the turn ends with it",
    Kind.FENCED: "an error for the model: no value begins there",
    Kind.TOGETHER: "an error for the model: the closing mark is missing",
    Kind.LISTED: "an error for the model: a call must be an object",
    Kind.UNLISTED: "an error for the model: how calls begin; in a format without an opening mark, it is content",
    Kind.SQUEEZED: "not read: the opening mark has a space in it, which is missing",
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
        "## Kind by kind",
        "",
        "For each format that at least one of vLLM's parsers reads, deltarunner is compared with the best of them: in",
        "how many trials each reads wrong, and in how many one is better than the other.",
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
        "Each kind of trial in which some parser of vLLM's reads a format better. `llama3_json` reads every JSON",
        "object as a call, also in an answer.",
        "",
        *table(("kind", "parsers, each with its number of formats", "why deltarunner differs"), _better(calls)),
        "",
        "## Format by format",
        "",
        "Templates with the same format are one row, under the template that most models have. The best parser of",
        "vLLM's comes first. A cell with two lines counts the right readings: first deltarunner's, then those of the",
        "best parser. The last two columns name the trials in which only one is right, and what the other one does.",
        "",
        *table(_FORMATS, map(_format, read)),
        "",
        "## Formats that no tested parser reads",
        "",
        "vLLM has parsers for gpt-oss and Command, but they were not tested.",
        "",
        *table(("template", "templates / models", "one call", "as written", "deviating"), map(_unread, unread)),
        "",
        "## Parser by parser",
        "",
        "The right readings of each parser, in the formats of which it reads a plain call.",
        "",
        *table(_PARSERS, _parsers(calls)),
        "",
        "## Reasoning",
        "",
        f"Templates mark reasoning in {len(thoughts)} ways, gpt-oss left out. The trials of each are turns with",
        "reasoning and an answer, with only one of them, cut turns, and turns with the marks in ordinary text. Each of",
        "vLLM's parsers was tested with and without the options that ask a template for reasoning. The better result",
        "counts.",
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
    "faults of the worse one",
)
_FORMATS: Final = (
    "template",
    "templates / models",
    "parsers",
    "as written",
    "deviating",
    "only deltarunner is right",
    "only vLLM is right",
)
_PARSERS: Final = ("parser", "formats", "best of vLLM in", "as written", "deviating", "wrong in text as written")
_THOUGHTS: Final = (
    "marks of reasoning",
    "templates / models",
    "deltarunner wrong",
    "vLLM's parsers, the best first",
    "the best wrong",
    "which",
)


def _introduction(calls: Sequence[CallRow]) -> list[str]:
    about = json.loads(ABOUT.read_text(encoding="utf-8"))
    tried = sum(len(names.split(", ")) for names in about["tool_parsers"])
    return [
        "vLLM reads tool calls with a parser that the user chooses by name. deltarunner learns the format of calls",
        f"from the chat template. Both read the {len(calls)} distinct formats of {_share(calls)}.",
        f"The version of vLLM is {about['vllm']}.",
        "",
        "- *as written*: text that the template itself writes. It includes all cases with which deltarunner checks a",
        "  learnt format, some more about schemas and call ids, and answers without a call.",
        "- *deviating*: known ways in which models deviate from their template, where the format can have them. Each",
        "  way counts once, however often models do it.",
        "- A reading is *right* if it returns the original call: names, arguments with their types, and the exact",
        "  content. It is also right if the template writes the same text for the call that was read and the schemas",
        "  allow that call. The tools' schemas have a type for every argument.",
        "- If both readings are wrong, the one with the right calls is better.",
        "- Parsers are called as in vLLM's server, for a complete turn. The vocabulary has all bytes and the control",
        f"  tokens of the template. {tried} parsers were tested. A parser that reads one plain call of a format",
        "  gets all trials of that format. The best parser is the one with the fewest faults.",
        "",
        "Not tested:",
        "",
        *(f"- `{name}` {why}" for name, why in NOT_TRIED.items() if name in about["registered"]),
        *(f"- `{name}` for reasoning: needs tokens that no template here has" for name in about["unfit"]),
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
        f"No tested parser reads {_formats(unread)}. In the other formats, the best parser of vLLM's has",
        "",
        *table(
            ("", "more faults than deltarunner", "as many", "fewer"),
            [compared("as written", as_written=True), compared("deviating", as_written=False)],
        ),
        "",
        f"deltarunner reads {written} trials right as templates write them, and {deviating} that deviate.",
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
    """The readers of these faults, and the number of each."""
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
