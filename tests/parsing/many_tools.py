"""An environment with two hundred tools, of which an episode calls a few."""

from __future__ import annotations

from typing import Literal

from runner import Environment, Task, Tool, reward

__all__ = ["MANY_TOOLS", "ManyTools"]


def _look_up(number: int) -> Tool:
    def look_up(query: str, limit: int = 3, kind: Literal["new", "old"] = "new", exact: bool = True) -> str:
        """Look something up.

        Args:
            query: what to look for.
            limit: how much at most.
            kind: which of them.
            exact: whether to the letter.
        """
        return f"{number}: {limit} {kind} things about {query}"

    return Tool(look_up, name=f"look_up_{number}")


# The names of some are how the names of others begin.
MANY_TOOLS = [_look_up(number) for number in range(200)]


class ManyTools(Environment):
    """One question."""

    def tasks(self) -> list[Task]:
        return [Task("where", prompt="Where is it?")]

    def bound_tools(self) -> list[Tool]:
        return list(MANY_TOOLS)

    @reward
    def done(self) -> bool:
        return self.episode.text == "Done."
