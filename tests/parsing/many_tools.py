"""Two hundred tools with different parameters, and an environment with all of them."""

from __future__ import annotations

from typing import Any

from runner import Environment, Task, Tool, reward

__all__ = ["MANY_TOOLS", "ManyTools", "arguments_of"]


def arguments_of(number: int) -> dict[str, Any]:
    """Return arguments for the tool with this number, one of every type that the tool accepts."""
    return {
        f"path_{number}": "some path",
        "text": "some text\nthat continues",
        "mode": f"slow {number}",
        "items": ["a", "b"],
        "count": number,
        "flag": True,
    }


def _act(number: int) -> Tool:
    def act(**given: Any) -> str:
        return f"{number} did {given}"

    text = {"type": "string"}
    properties = {
        f"path_{number}": text,
        "text": text,
        "mode": {"enum": ["fast", f"slow {number}"]},
        "items": {"type": "array", "items": text},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": [f"path_{number}"]}
    return Tool(act, name=f"act_{number}", description=f"Act in way {number}.", parameters=schema)


# Some names are prefixes of other names.
MANY_TOOLS = [_act(number) for number in range(200)]


class ManyTools(Environment):
    """Environment with one question."""

    def tasks(self) -> list[Task]:
        return [Task("where", prompt="Where is it?")]

    def bound_tools(self) -> list[Tool]:
        return list(MANY_TOOLS)

    @reward
    def done(self) -> bool:
        return self.episode.text == "Done."
