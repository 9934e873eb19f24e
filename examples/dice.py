"""An environment of your own in under 20 lines: a tool, a task, a reward.

Play it with: deltarunner run examples/dice.py:Dice -n 16
"""

from runner import Environment, Limits, Sampling, Task, reward, tool


class Dice(Environment):
    """Roll a die and report the result."""

    tool_choice = "required"
    limits, sampling = Limits(turns=4), Sampling(max_tokens=32)
    rolled: int | None = None

    def tasks(self) -> list[Task]:
        return [Task(id=f"d{n}", prompt=f"Roll a die with {n} sides and report the result.") for n in range(2, 100)]

    @tool
    def roll(self, sides: int) -> int:
        """Roll a die."""
        self.rolled = self.episode.rng.randint(1, max(1, sides))
        return self.rolled

    @tool
    def report(self, result: int) -> str:
        """Report the result."""
        self.episode.end("right" if result == self.rolled else "wrong")
        return "thank you"

    @reward
    def honest(self) -> bool:
        return self.episode.reason == "right"
