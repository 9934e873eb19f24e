"""The kinds of arguments that each tool-capable template shows, by schemas as they are written and as it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.tokens.shown_arguments import unseen_of
from runner.tokens.tool_support import shows_tools
from tests.conformance.argument_kinds import KINDS, kinds
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import is_tool_capable, spread

__all__ = ["Shown", "capable", "look", "look_all", "section"]


@dataclass(frozen=True, slots=True)
class Shown:
    """The kinds of arguments that a template shows."""

    name: str
    fitted: bool
    """True if some schemas are rewritten for it."""
    written: int
    """The number of kinds of which it shows every field, value and type, as their schemas are written."""
    unseen: tuple[str, ...]
    """The parts that it does not show in spite of that, each with its kind."""


def capable() -> list[Entry]:
    """The templates that show tools, calls and results; the others are refused for an environment with tools."""
    return [entry for entry in corpus() if is_tool_capable(entry) and shows_tools(entry.renderer())]


def look(entry: Entry) -> Shown:
    """Look at all the kinds, each by itself."""
    written = entry.renderer()
    renderer = written.template.renderer(now=written.now, fit_tools=None)
    unseen = [f"{kind}: {each}" for kind in KINDS for each in unseen_of(renderer.render_tool, kinds()[kind])]
    shown = (
        sum(not unseen_of(written.render_tool, kinds()[kind]) for kind in KINDS) if renderer.fits_tools else len(KINDS)
    )
    return Shown(entry.name, renderer.fits_tools, shown, tuple(unseen))


def look_all(processes: int = 1) -> list[Shown]:
    """The shown parts of all of them."""
    return spread(look, capable(), processes)


def section(rows: Sequence[Shown]) -> list[str]:
    """The part of the page about arguments."""
    fitted = sorted((row for row in rows if row.fitted), key=lambda row: row.name.lower())
    everything = sum(not row.unseen for row in rows)
    return [
        f"{len(rows)} of the tool-capable templates also write the definitions of the tools into the prompt. Each was",
        f"tested with {len(KINDS)} kinds of arguments, from `str` to recursive models and schemas of MCP servers. A",
        "kind is *shown* if all its fields, values and types are in the prompt.",
        f"{len(rows) - len(fitted)} templates show all kinds if they get the schemas as their authors wrote them. The",
        f"other {len(fitted)} templates do not. For these, deltarunner rewrites the schemas",
        "[in a form that they can show](chat-templates.md#tools-as-a-template-can-show-them).",
        f"With the rewritten schemas, {everything} of {len(rows)} templates show all kinds. The table has the number",
        f"of kinds that each of the {len(fitted)} templates shows.",
        "",
        "| template | with the authors' schemas | with rewritten schemas |",
        "| --- | ---: | ---: |",
        *(f"| {row.name} | {row.written} | {len(KINDS) - _kinds_unseen(row)} |" for row in fitted),
        "",
        *(f"- {row.name} does not show {'; '.join(row.unseen)}" for row in rows if row.unseen),
    ]


def _kinds_unseen(row: Shown) -> int:
    return len({each.partition(":")[0] for each in row.unseen})
