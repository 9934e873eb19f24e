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
        "A *bridge* is the text between two turns of the model: new messages, and the start of its next turn.",
        "This page shows for which chat templates, and in which situations, the bridge is exactly the template's text.",
        "",
        f"{templates} chat templates of public models are tested, {capable} of them tool-capable, in",
        f"{len(outcomes)} cases: twelve scenarios, each after three kinds of earlier conversation. Each case is played",
        "twice: with the turn tokenized by the vocabulary, and with the same text in other token ids. The expected",
        "text is taken from a render of the whole conversation.",
        "",
        "- *renderable*: the template renders the case, writes the turn and then every new message, and asks for an",
        "  answer. A template is tool-capable if it writes the argument of a call and, after it, the result.",
        "- *bridged*: the ids and the text of the bridge equal what the template writes after the turn.",
        "- *after the stop*: bridged, and the template writes the stop token that was sampled.",
        "- *after the end of the turn*: bridged, and the template ends the turn with another text than the stop token.",
        "  The remaining bridged cases are cut turns, which have no stop token.",
        "- *refused*: no bridge was made, and the error names the missing property.",
        "- *wrong*: anything else.",
        "- *no exact bridge*: the template renders the case, but it repeats the turn, leaves out a message, moves the",
        "  tools or does not ask for an answer. Every bridge would be wrong. All these cases are refused by name, and",
        "  they do not count as renderable.",
        "",
        _shares(outcomes),
        "",
        "## By scenario and earlier conversation",
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
        "## No exact bridge, by reason",
        "",
        *_names("reason", (o for o in outcomes if o.verdict is Verdict.NO_EXACT_BRIDGE)),
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
    "renderable": lambda o: o.verdict not in (Verdict.NOT_APPLICABLE, Verdict.NO_EXACT_BRIDGE),
    "bridged": lambda o: o.verdict is Verdict.EXACT,
    "after the stop": lambda o: o.verdict is Verdict.EXACT and o.detail == "stop",
    "after the end of the turn": lambda o: o.verdict is Verdict.EXACT and o.detail == "common_prefix",
    "refused": lambda o: o.verdict is Verdict.REFUSED,
    "no exact bridge": lambda o: o.verdict is Verdict.NO_EXACT_BRIDGE,
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
    lines = [_line(["vocabulary", "template", "bridged", "after the end of the turn", "refused", "wrong"])]
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
    share, whole = bridged / right, bridged / (right + counts[Verdict.NO_EXACT_BRIDGE])
    return (
        f"Of the cases of tool-capable templates that have an exact bridge, {share:.2%} are bridged. "
        f"Of all their cases that render, {whole:.2%} are bridged."
    )


def _names(first: str, outcomes: Iterable[Outcome]) -> list[str]:
    counts = Counter(o.detail for o in outcomes)
    return [_line([first, "cases"]), _line(["---", "---:"]), *(_line(item) for item in counts.most_common())]


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
