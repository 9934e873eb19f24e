"""Find a hidden word: ask about letters with a tool, and guess until the word is right."""

from __future__ import annotations

import re

from runner import Environment, Limits, Sampling, Task, ToolError, Turn, metric, reward, tool

WORDS = ("heron", "raven", "eagle", "birch", "maple", "cedar", "nickel", "copper", "silver")


class NewEnvironment(Environment):
    """Find a hidden word; a tool returns the positions of a letter, and each guess is answered."""

    system_prompt = "Find the hidden word. Ask about letters with the tool. To guess, say one word and nothing else."
    limits = Limits(turns=12)
    sampling = Sampling(max_tokens=64)

    def __init__(self, guesses: int = 3) -> None:
        """Choose the game: `deltarunner run new_environment --set guesses=5`.

        Args:
            guesses: number of guesses that are allowed.
        """
        self.guesses = guesses
        # The state of one episode, since each episode has its own object.
        self.secret = ""
        self.asked: list[str] = []
        self.guessed: list[str] = []

    def tasks(self) -> list[Task]:
        return [Task(id=f"word-{number}", answer=word) for number, word in enumerate(WORDS)]

    def setup(self) -> None:
        self.secret = self.task.answer

    def prompt(self) -> str:
        # The episode's own random numbers: each task has another order, and the episodes of a group have the same one.
        words = self.episode.rng.sample(WORDS, len(WORDS))
        return f"It is one of these: {', '.join(words)}."

    @tool
    def find_letter(self, letter: str) -> list[int]:
        """Find where a letter stands in the hidden word; the first place is 1.

        Args:
            letter: one letter.
        """
        if len(letter) != 1:
            raise ToolError("Ask about one letter.")  # the model reads this and continues
        self.asked.append(letter)
        return [place for place, there in enumerate(self.secret, start=1) if there == letter.lower()]

    def step(self, turn: Turn) -> str | None:
        """Answer a turn that calls no tool, which is a guess; None ends the episode."""
        word = re.search(r"[a-z]+", turn.text.lower())
        self.guessed.append(word[0] if word else "")
        if self.found() or len(self.guessed) >= self.guesses:
            return None
        return "No, it is another one." if word else "That is not a word. Guess one."

    @reward
    def found(self) -> bool:
        return self.secret in self.guessed

    @reward(weight=0.1)
    def at_once(self) -> bool:
        """The first guess was right."""
        return self.guessed[:1] == [self.secret]

    @metric
    def letters(self) -> float:
        return len(self.asked)
