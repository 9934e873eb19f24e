"""The tables of a sweep, as Markdown: by scenario, by family, and what was refused or wrong by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.conformance.real import Tally
from tests.conformance.scenarios import Past, Scenario
from tests.conformance.shown import Shown, section
from tests.conformance.sweep import Outcome, Verdict

__all__ = ["faults", "page"]


def page(outcomes: Sequence[Outcome], tallies: Sequence[Tally], shown: Sequence[Shown]) -> str:
    """The generated page, docs/conformance.md."""
    rows = [
        (f"{scenario}, {past}", [o for o in outcomes if (o.scenario, o.past) == (scenario, past)])
        for past in Past
        for scenario in Scenario
    ]
    families = sorted({o.family for o in outcomes}, key=str.lower)
    by_family = [(family, [o for o in outcomes if o.family == family]) for family in families]
    templates = len({o.template for o in outcomes})
    capable = len({o.template for o in outcomes if o.tools})
    return "\n".join([
        "# Conformance of the token bridge",
        "",
        "Written by `python -m tests.conformance --write`; a test compares it with a fresh run.",
        "",
        f"{templates} chat templates of public models, {capable} of them tool-capable, play {len(outcomes)} cases:",
        "twelve scenarios after three kinds of past. Each is bridged twice, after the turn as the vocabulary writes it",
        "and after the same text in other ids. What must come out is read off a full render of the real conversation.",
        "",
        "- *renderable*: the template renders the case, shows the turn and every new message after it, and asks for",
        "  an answer. Tool-capable: it shows a call's argument and then the result.",
        "- *bridged*: ids and text equal the template's own tail after the sampled stop, or, where that does not stand",
        "  there, after the template's own close. The rest of them are cut turns, which have no stop.",
        "- *refused*: no bridge was made, and the missing property is named. *Wrong*: anything else.",
        "- *no right one*: the template renders the case, but repeats the turn, hides a message, moves the tools or",
        "  never asks, so that any bridge would be wrong; each is refused by name, and none counts as renderable.",
        "",
        _shares(outcomes),
        "",
        "## By scenario and past",
        "",
        *_table("scenario", rows),
        "",
        "## By family",
        "",
        *_table("family", by_family),
        "",
        "## Refused, by name",
        "",
        *_names("refusal", (o for o in outcomes if o.verdict is Verdict.REFUSED)),
        "",
        "## No right one, by reason",
        "",
        *_names("reason", (o for o in outcomes if o.verdict is Verdict.NO_RIGHT_ONE)),
        "",
        "## Not applicable, by reason",
        "",
        *_names("reason", (o for o in outcomes if o.verdict is Verdict.NOT_APPLICABLE)),
        "",
        "## What models are shown of arguments",
        "",
        *section(shown),
        "",
        "## Real vocabularies",
        "",
        *_pairs(tallies),
        "",
    ])  # fmt: skip


def faults(outcomes: Iterable[Outcome], tallies: Iterable[Tally] = ()) -> list[str]:
    """A line for each wrong case."""
    real = [f"- {t.pair.template} with {t.pair.vocabulary}, {line}" for t in tallies for line in t.wrong]
    return real + [
        f"- {o.template} [{o.family}], {o.scenario}, {o.past}: {o.detail}"
        for o in outcomes
        if o.verdict is Verdict.WRONG
    ]


_COLUMNS: dict[str, Callable[[Outcome], bool]] = {
    "renderable": lambda o: o.verdict not in (Verdict.NOT_APPLICABLE, Verdict.NO_RIGHT_ONE),
    "bridged": lambda o: o.verdict is Verdict.EXACT,
    "on the stop": lambda o: o.verdict is Verdict.EXACT and o.detail == "stop",
    "by the fallback": lambda o: o.verdict is Verdict.EXACT and o.detail == "common_prefix",
    "refused": lambda o: o.verdict is Verdict.REFUSED,
    "no right one": lambda o: o.verdict is Verdict.NO_RIGHT_ONE,
    "wrong": lambda o: o.verdict is Verdict.WRONG,
}


def _table(first: str, rows: Sequence[tuple[str, Sequence[Outcome]]]) -> list[str]:
    lines = [_line([first, *_COLUMNS]), _line(["---", *("---:" for _ in _COLUMNS)])]
    for name, outcomes in [*rows, ("all", [o for _, some in rows for o in some])]:
        counts = [sum(map(test, outcomes)) for test in _COLUMNS.values()]
        if outcomes:
            lines.append(_line([name, *counts]))
    return lines


def _pairs(tallies: Sequence[Tally]) -> list[str]:
    lines = [_line(["vocabulary", "template", "bridged", "by the fallback", "refused", "wrong"])]
    lines.append(_line(["---", "---", *["---:"] * 4]))
    rows = [
        (sum(t.anchors.values()), t.anchors.get("common_prefix", 0), sum(t.refused.values()), len(t.wrong))
        for t in tallies
    ]
    lines += [_line([t.pair.vocabulary, t.pair.template, *row]) for t, row in zip(tallies, rows, strict=True)]
    return [*lines, _line(["all", "", *(sum(column) for column in zip(*rows, strict=True))])]


def _shares(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(o.verdict for o in outcomes if o.tools)
    bridged, right = counts[Verdict.EXACT], counts[Verdict.EXACT] + counts[Verdict.REFUSED] + counts[Verdict.WRONG]
    share, whole = bridged / right, bridged / (right + counts[Verdict.NO_RIGHT_ONE])
    return (
        f"Of the tool-capable templates' cases {share:.2%} of those that have a right bridge are bridged, "
        f"and {whole:.2%} of all that render."
    )


def _names(first: str, outcomes: Iterable[Outcome]) -> list[str]:
    counts = Counter(o.detail for o in outcomes)
    return [_line([first, "cases"]), _line(["---", "---:"]), *(_line(item) for item in counts.most_common())]


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
