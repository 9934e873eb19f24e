"""Games of TextArena, for one player, against an opponent, or in self-play."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.errors import BadEnvironment, BadOption
from runner.interop.packages import optional_package
from runner.options import Limits
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.trajectory import Turn

__all__ = ["TextArena"]

ReturnT = TypeVar("ReturnT")

_GAME_ID: Final = -1
"""The sender of the game's own messages."""

_lock = threading.Lock()


class TextArena(Environment):
    """A game of TextArena (`--set game=TicTacToe-v0`); each player reads only what the game shows to that player.

    `main` is player 0. In self-play the others are the trained agents `player_1` and so on, each with a reward of its
    own. Otherwise they are untrained agents of the same names, which may have engines of their own.
    """

    package = ("textarena", "textarena")
    limits = Limits(turns=100)

    def __init__(self, game: str, players: int = 2, games: int = 100, self_play: bool = True) -> None:
        """Choose the game.

        Args:
            game: the id of the game, such as "TicTacToe-v0".
            players: the number of players.
            games: the number of tasks; each has its own seed.
            self_play: train all players; otherwise only `main`.

        Raises:
            BadEnvironment: the package is missing, or the game is unknown.
            BadOption: the number of players is below 1.
        """
        if players < 1:
            raise BadOption(f"players={players}: give a number from 1.")
        self._textarena = optional_package("textarena", extra="textarena", least="0.7")
        if game not in self._textarena.envs.registration.ENV_REGISTRY:
            raise BadEnvironment(f"TextArena has no game {game!r}: give an id such as TicTacToe-v0.")
        self._game, self._players, self._games, self._self_play = game, players, games, self_play
        self._env: Any = None
        self._random: Any = None
        self._names: dict[str, int] = {}
        self._player, self._shown = 0, ""
        self._over = False

    def tasks(self) -> Iterator[Task]:
        """Return `games` tasks. Each has its own seed."""
        return (Task(id=f"{self._game}-{number}") for number in range(self._games))

    def setup(self) -> None:
        """Make the game, and reset it with the seed of the task.

        Raises:
            BadEnvironment: the game does not allow this number of players.
        """
        self._random = random.Random(self.episode.rng.getrandbits(31)).getstate()
        seed = self.episode.rng.getrandbits(31)
        self._with_own_random(lambda: self._reset(seed))
        self._names = {"main": 0, **{f"player_{number}": number for number in range(1, self._players)}}

    async def rollout(self, conversation: Conversation) -> None:
        """Play the turns of all players, until the game is over."""
        conversations = {0: conversation}
        for name, number in list(self._names.items())[1:]:
            conversations[number] = self.episode.conversation(name, train=self._self_play)
        while not self._over:
            player = conversations[self._player]
            player.add(self._shown)
            await self.episode.answer(await player.generate())

    def step(self, turn: Turn) -> None:
        """Make the move of a turn, and read what the game shows to the next player."""
        self._over = bool(self._with_own_random(lambda: self._env.step(turn.text))[0])
        if not self._over:
            self._with_own_random(self._look)

    @reward
    def outcome(self) -> dict[str, float] | float:
        """The game's reward of each player; only the reward of `main` if only `main` is trained.

        If a limit of the episode ends the game, all rewards are 0, as for a draw at TextArena's own limit of turns.
        """
        rewards = self._env.state.rewards or {}
        if not self._self_play:
            return float(rewards.get(0, 0))
        spoke = self.episode.conversations
        return {name: float(rewards.get(number, 0)) for name, number in self._names.items() if name in spoke}

    @metric
    def finished(self) -> bool:
        """True if the game ended by its rules, False if a limit of the episode ended it."""
        return self._over

    def _reset(self, seed: int) -> None:
        spec = self._textarena.envs.registration.ENV_REGISTRY[self._game]
        # Wrappers that repeat the whole game in each observation are left out, since the conversation already has it.
        self._env = self._textarena.make(f"{self._game}-raw")
        formatting = self._textarena.wrappers.ActionFormattingWrapper
        if formatting in (spec.default_wrappers or ()):
            self._env = formatting(self._env)
        try:
            self._env.reset(num_players=self._players, seed=seed)
        except AssertionError as error:
            raise BadEnvironment(f"players={self._players}: {self._game} needs another number ({error}).") from None
        self._look()

    def _look(self) -> None:
        self._player, messages = self._env.get_observation()
        others = (each for each in messages if each[0] != self._player)
        self._shown = "\n\n".join(
            text.strip() if sender == _GAME_ID else f"[Player {sender}] {text.strip()}" for sender, text, *_ in others
        )
        self._shown = self._shown or "It is your turn."

    def _with_own_random(self, call: Callable[[], ReturnT]) -> ReturnT:
        """Call a function of the game. During the call, Python's global random generator has the state of this game.

        Games seed this generator and draw from it.
        """
        with _lock:
            before = random.getstate()
            random.setstate(self._random)
            try:
                return call()
            finally:
                self._random = random.getstate()
                random.setstate(before)
