"""The argument kinds that each tool-capable template shows, with the original schemas and with rewritten ones."""

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
    """The argument kinds that a template shows."""

    name: str
    fitted: bool
    """True if some schemas are rewritten for this template."""
    written: int
    """The number of kinds whose every field, value and type is shown with the original schema."""
    unseen: tuple[str, ...]
    """The parts that are not shown even after rewriting, each with its kind."""


def capable() -> list[Entry]:
    """The templates that show tools, calls and results. An environment with tools refuses the others."""
    return [entry for entry in corpus() if is_tool_capable(entry) and shows_tools(entry.renderer())]


def look(entry: Entry) -> Shown:
    """Find the shown parts of each kind, one kind at a time."""
    written = entry.renderer()
    renderer = written.template.renderer(now=written.now, fit_tools=None)
    unseen = [f"{kind}: {each}" for kind in KINDS for each in unseen_of(renderer.render_tool, kinds()[kind])]
    shown = (
        sum(not unseen_of(written.render_tool, kinds()[kind]) for kind in KINDS) if renderer.fits_tools else len(KINDS)
    )
    return Shown(entry.name, renderer.fits_tools, shown, tuple(unseen))


def look_all(processes: int = 1) -> list[Shown]:
    """Find the shown parts for all templates."""
    return spread(look, capable(), processes)


def section(rows: Sequence[Shown]) -> list[str]:
    """Return the page's section about arguments."""
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
