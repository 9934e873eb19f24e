"""The tables of a sweep, as Markdown: by scenario, by family, and the refused and wrong cases by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tests.conformance.real import Tally
from tests.conformance.scenarios import Past, Scenario
from tests.conformance.shown import Shown, section
from tests.conformance.sweep import Outcome, Verdict

__all__ = ["faults", "page"]

INTRODUCTION: Final = """# Conformance of the token bridge

Written by `python -m tests.conformance --write`; a test compares it with a fresh run.

A model samples a turn. Then messages are added, such as the result of a tool, and the model samples its next turn. The
*bridge* has the token ids between these two turns: the rest of the text that ends the first turn, the new messages, and
the text that begins the next turn ([details](chat-templates.md#prompt-sampled-bridge)). This page shows for which chat
templates, and in which situations, the bridge is exactly what the template writes.

{templates} chat templates of public models are tested in {cases} cases. {capable} of these templates are
*tool-capable*: if there are tools, they write the argument of a call and, after it, the result. A case is one of twelve
scenarios after one of three kinds of earlier conversation. In some scenarios the turn is *cut*: it ended at a limit,
before the model sampled a stop token. The kinds of earlier conversation are:

- *short*: one user message.
- *turns*: a system message, a question, an answer, and the next question.
- *rounds*: questions that were answered with tool calls. Only tool-capable templates have these cases.

Each case is played twice: with the turn in the token ids that the tokenizer makes of its text, and with the same text
in other token ids, which a model may sample too. All templates use one test vocabulary. The expected text is taken from
a render of the whole conversation.

The columns of the tables are:

- *renderable*: the template renders the case, writes the turn and then every new message, and asks for an answer. Each
  renderable case is bridged, refused or wrong.
- *bridged*: the ids and the text of the bridge equal what the template writes after the turn.
- *after the stop*: bridged. The template ends the turn with the stop token that was sampled, and the bridge begins
  after this token.
- *after the end of the turn*: bridged. The template ends the turn with another text than the stop token, and the bridge
  begins after this text. The remaining bridged cases are cut turns, which have no stop token.
- *refused*: no bridge was made, and the error names the missing property.
- *no exact bridge*: the template renders the case, but it repeats the turn, leaves out a message, moves the tools or
  does not ask for an answer. Every bridge would be wrong. All these cases are refused with an error that names the
  reason, and they are not counted as renderable.
- *wrong*: a bridge was made that is not exact.
"""


def page(outcomes: Sequence[Outcome], tallies: Sequence[Tally], shown: Sequence[Shown]) -> str:
    """Return the generated page, docs/conformance.md."""
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
        INTRODUCTION.format(templates=templates, cases=f"{len(outcomes):,}", capable=capable),
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
        "## Refused cases by missing property",
        "",
        "[Why there is no bridge](chat-templates.md#why-there-is-no-bridge) explains these properties.",
        "",
        *_names("missing property", (o for o in outcomes if o.verdict is Verdict.REFUSED)),
        "",
        "## Cases without an exact bridge by reason",
        "",
        *_names("reason", (o for o in outcomes if o.verdict is Verdict.NO_EXACT_BRIDGE)),
        "",
        "## Cases that are left out, by reason",
        "",
        "In these cases the template raises an error, or its render does not show where the turn ends. The tables",
        "above leave them out.",
        "",
        *_names("reason", (o for o in outcomes if o.verdict is Verdict.NOT_APPLICABLE)),
        "",
        "## Tool arguments that templates show",
        "",
        *section(shown),
        "",
        "## Real vocabularies",
        "",
        "The same scenarios with the vocabularies of models, and with natural and unusual texts: code, tags, many",
        "scripts, emoji. Each pair of a vocabulary and a template has 200 renderable cases.",
        "",
        *_pairs(tallies),
        "",
    ])  # fmt: skip


def faults(outcomes: Iterable[Outcome], tallies: Iterable[Tally] = ()) -> list[str]:
    """Return a line for each wrong case."""
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
    for tally, (bridged, after_end, refused, wrong) in zip(tallies, rows, strict=True):
        why = f"{refused} ({', '.join(tally.refused)})" if refused else 0
        lines.append(_line([tally.pair.vocabulary, tally.pair.template, bridged, after_end, why, wrong]))
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
