"""An environment for games of Gymnasium, with actions and observations as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from runner.environment.environment import Environment
from runner.errors import BadEnvironment, BadOption
from runner.interop.packages import optional_package
from runner.options import Limits, Sampling
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.trajectory import Turn

__all__ = ["Gymnasium"]

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
"""ANSI colour codes in the text that a game renders."""


class Gymnasium(Environment):
    """A game of Gymnasium (`--set game=FrozenLake-v1`).

    The model writes the name of an action, and reads the observation.
    """

    package = ("gymnasium", "gymnasium")
    limits = Limits(turns=100)

    def __init__(
        self,
        game: str,
        actions: Sequence[str] = (),
        describe: Callable[[Any], str] | None = None,
        parse: Callable[[str], Any] | None = None,
        instructions: str = "",
        games: int = 100,
        choice: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose the game.

        Args:
            game: the id of the game, such as "FrozenLake-v1"; "module:Game-v0" imports the module first.
            actions: the names of the actions of a discrete space, in order; by default their numbers.
            describe: a function that returns the text of an observation; by default the text that the game renders.
                If the game renders no text, a string observation is unchanged, and any other observation becomes JSON.
            parse: a function that returns the action for the text of a turn, and raises ValueError if the text is not
                an action; required unless the action space is discrete or text.
            instructions: the beginning of the prompt.
            games: the number of tasks; each has its own seed.
            choice: True to let the model write only names of legal actions (`info["action_mask"]`). This has an effect
                only if the action space is discrete and `parse` is None.
            options: arguments of `gymnasium.make`.

        Raises:
            BadEnvironment: the package is missing.
            BadOption: `actions` is not a list of names.
        """
        self._gymnasium = optional_package("gymnasium", extra="gymnasium", least="1.0")
        if isinstance(actions, str) or not all(isinstance(each, str) and each for each in actions):
            raise BadOption(f"actions={actions!r:.60}: give a list of names.")
        self._game, self._names, self._describe, self._parse = game, list(actions), describe, parse
        self._instructions, self._games, self._choice = instructions, games, choice
        self._options = dict(options or {})
        self._renders = self._renders_text()
        self._env: Any = None
        self._by_name: dict[str, Any] = {}
        self._observation: Any = None
        self._total = 0.0
        self._steps = 0

    def tasks(self) -> Iterator[Task]:
        """Return `games` tasks. Each has its own seed.

        Raises:
            BadEnvironment: the game is unknown, or its actions need `parse`.
            BadOption: `actions` does not have one name for each action of the game.
        """
        self._made().close()  # the game is made once here, so that an error is raised before the first episode
        return (Task(id=f"{self._game}-{number}") for number in range(self._games))

    def setup(self) -> None:
        """Make the game, and reset it with the seed of the task."""
        self._env = self._made()
        self._observation, info = self._env.reset(seed=self.episode.rng.getrandbits(31))
        self._allow(info)

    def prompt(self) -> str:
        """Instructions, the names of the actions, and the first observation."""
        names = f"Reply with one of: {', '.join(self._by_name)}." if self._by_name else ""
        return "\n\n".join(filter(None, [self._instructions, names, self._text()]))

    def step(self, turn: Turn) -> str | None:
        """Take the action of a turn. Return the next observation, or None at the end of the game.

        If the text is not an action, the game does not change, and the result is an error text for the model.
        """
        try:
            action = self._action(turn.text)
        except ValueError as error:
            return str(error) or "That is not an action."
        self._observation, gained, terminated, truncated, info = self._env.step(action)
        self._total += float(gained)
        self._steps += 1
        if terminated or truncated:
            return None
        self._allow(info)
        return self._text()

    def close(self) -> None:
        self._env.close()

    @reward
    def total(self) -> float:
        """The sum of the game's rewards."""
        return self._total

    @metric
    def steps(self) -> int:
        """The number of actions that were taken."""
        return self._steps

    def _made(self) -> Any:
        options = {**({"render_mode": "ansi"} if self._renders else {}), **self._options}
        try:
            env = self._gymnasium.make(self._game, **options)
        except (self._gymnasium.error.Error, ImportError, TypeError) as error:
            raise BadEnvironment(
                f"game={self._game!r:.60} cannot be made ({error!s:.300}): correct game= or options=."
            ) from None
        space, spaces = env.action_space, self._gymnasium.spaces
        if self._parse is None and not isinstance(space, spaces.Discrete | spaces.Text):
            env.close()
            raise BadEnvironment(
                f"{self._game} has actions {space}: give parse=, a function that returns the action for a turn's text."
            )
        if self._names and isinstance(space, spaces.Discrete) and len(self._names) != space.n:
            env.close()
            raise BadOption(f"actions={self._names!r:.80}: {self._game} has {space.n} actions: name all of them.")
        return env

    def _renders_text(self) -> bool:
        try:
            if self._describe is not None:
                return False
            with closing(self._gymnasium.make(self._gymnasium.spec(self._game))) as game:
                modes = game.metadata.get("render_modes", [])
        except (self._gymnasium.error.Error, ImportError, TypeError):
            return False
        return "ansi" in modes

    def _allow(self, info: Mapping[str, Any]) -> None:
        """Set the legal actions of the next turn."""
        space = self._env.action_space
        if self._parse is not None or not isinstance(space, self._gymnasium.spaces.Discrete):
            return
        numbers = range(int(space.n))
        mask = info.get("action_mask")
        legal = [number for number in numbers if mask is None or mask[number]] or list(numbers)
        names = self._names or [str(number + int(space.start)) for number in numbers]
        self._by_name = {names[number]: number + int(space.start) for number in legal}
        if self._choice:
            self.sampling = Sampling(choice=tuple(self._by_name))

    def _action(self, text: str) -> Any:
        if self._parse is not None:
            return self._parse(text)
        if not self._by_name:
            return text
        name = text.strip()
        if name not in self._by_name:
            raise ValueError(f"{name!r:.60} is not a legal action. Reply with one of: {', '.join(self._by_name)}.")
        return self._by_name[name]

    def _text(self) -> str:
        if self._describe is not None:
            return self._describe(self._observation)
        rendered = self._env.render() if self._renders else None
        return _COLOURS.sub("", rendered).strip("\n") if isinstance(rendered, str) else _as_text(self._observation)


def _as_text(observation: Any) -> str:
    """Return an observation as text: a string unchanged, other values as JSON with rounded numbers."""
    return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 4)
    return value if isinstance(value, str | int | bool | None) else str(value)
