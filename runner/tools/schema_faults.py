"""Sentences about tools with a schema that no call satisfies, or that is not checked completely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.tools.modern_schema import modern
from runner.tools.schema_shapes import shapes_for
from runner.tools.tool import Tool

__all__ = ["schema_faults", "uncallable"]


def uncallable(tools: Iterable[Tool]) -> Iterator[str]:
    """Yield a sentence for each tool whose check refuses every call."""
    for tool in tools:
        why = shapes_for(tool.parameters).why_uncallable()
        if why is not None:
            yield (
                f"no call of the tool {tool.name!r} passes its check: {why}. Correct its schema. The tool is left out "
                "of required and strict calls."
            )


def schema_faults(tools: Iterable[Tool]) -> Iterator[str]:
    """Yield a sentence for each tool whose schema is not checked completely, or refuses every call."""
    for tool in tools:
        notes = ", ".join(map(str, modern(tool.parameters).notes))
        if notes:
            yield f"the schema of the tool {tool.name!r} is not checked completely: {notes}"
        yield from uncallable([tool])
