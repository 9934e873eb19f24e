"""A game of guessing a number: `step` answers each guess."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner import Environment, Limits, Sampling, Task, Turn, metric, reward


class GuessNumber(Environment):
    """Guess a number between 1 and `highest`; each guess is answered with higher, lower or correct."""

    system_prompt = "You play a guessing game. Reply with one number and nothing else."
    limits = Limits(turns=12)
    sampling = Sampling(max_tokens=16)

    def __init__(self, highest: int = 100, games: int = 100) -> None:
        """Choose the game.

        Args:
            highest: the largest possible number.
            games: number of tasks.
        """
        self.highest = highest
        self.games = games
        self.secret = 0
        self.guesses: list[int] = []

    def tasks(self) -> Iterator[Task]:
        for number in range(self.games):
            yield Task(id=f"game-{number}", prompt=f"I think of a number from 1 to {self.highest}. Guess it.")

    def setup(self) -> None:
        self.secret = self.episode.rng.randint(1, self.highest)

    def step(self, turn: Turn) -> str | None:
        number = re.search(r"-?\d+", turn.text)
        if number is None:
            return "That is not a number. Guess a number."
        self.guesses.append(int(number[0]))
        if self.guesses[-1] == self.secret:
            return None
        return "higher" if self.guesses[-1] < self.secret else "lower"

    @reward
    def found(self) -> bool:
        return self.secret in self.guesses

    @metric
    def tries(self) -> float:
        return len(self.guesses)
