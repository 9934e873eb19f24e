"""Any data set of the package reasoning-gym, scored by the package's own scorer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner import Environment, Sampling, Task, reward
from runner.errors import BadEnvironment


@dataclass(frozen=True)
class Puzzle(Task):
    """One entry of a reasoning-gym data set."""

    entry: dict[str, Any] = field(default_factory=dict)
    """The entry itself, which the package's scorer needs."""


class Reasoning(Environment[Puzzle]):
    """Puzzles of reasoning-gym (`--set dataset=chain_sum`), one turn each."""

    system_prompt = "Think step by step, then give the final answer between <answer> and </answer>."
    sampling = Sampling(max_tokens=512)
    package = ("reasoning_gym", "reasoning")

    def __init__(self, dataset: str = "leg_counting", size: int = 100, seed: int = 0) -> None:
        """Choose the puzzles.

        Args:
            dataset: a data set of reasoning-gym, such as "leg_counting" or "chain_sum".
            size: number of puzzles.
            seed: seed of the puzzles.
        """
        self.dataset = dataset
        self.size = size
        self.seed = seed

    def tasks(self) -> Iterator[Puzzle]:
        for number, entry in enumerate(self._puzzles()):
            yield Puzzle(
                id=f"{self.dataset}-{self.seed}-{number}",
                prompt=entry["question"],
                answer=str(entry["answer"]),
                entry=entry,
            )

    @reward
    def score(self) -> float:
        gym = _reasoning_gym()
        answer = gym.utils.extract_answer(self.episode.text)
        return float(gym.get_score_answer_fn(self.dataset)(answer=answer, entry=self.task.entry))

    def _puzzles(self) -> Any:
        try:
            return _reasoning_gym().create_dataset(self.dataset, size=self.size, seed=self.seed)
        except ValueError as error:
            raise BadEnvironment(
                f"reasoning-gym has no data set {self.dataset!r} ({error}): give another one with --set dataset=NAME."
            ) from error


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise BadEnvironment(
            "reasoning needs the package reasoning-gym: pip install 'deltarunner[reasoning]'"
        ) from error
    return reasoning_gym
