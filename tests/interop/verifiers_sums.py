"""An environment of verifiers 0.1: sums with a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def right(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment():
    rows = [{"question": "2 + 3?", "answer": "5"}, {"question": "4 + 3?", "answer": "7"}]
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=4)
