"""Arithmetic with a calculator: every turn is a call, and the last call is the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from runner import Environment, Limits, Message, Sampling, Task, reward, tool
from runner.errors import BadEnvironment

OPERATORS = {"+": "add", "-": "subtract", "*": "multiply"}


@dataclass(frozen=True)
class Question(Task):
    """A question `(first inner second) outer third`, with the two calls that solve it and their value."""

    calls: tuple[tuple[str, int, int], ...] = ()
    """The calls that solve it, in order: the tool and its two numbers."""
    value: int = 0
    """The right answer."""


class Calculator(Environment[Question]):
    """Answer questions such as "What is (17 + 25) * 3?" with a calculator, one call a turn."""

    system_prompt = "Answer with one function call at a time."
    tool_choice = "required"
    limits = Limits(turns=6)
    sampling = Sampling(max_tokens=48)

    def __init__(
        self, questions: int = 1000, first: int = 0, examples: int = 2, inner: str = "+", outer: str = "*"
    ) -> None:
        """Choose the questions.

        Args:
            questions: number of questions.
            first: number of the first question; each number stands for another question.
            examples: number of solved questions that are shown before each question.
            inner: operators that may be in the parentheses, of + - *; a small model does best with one.
            outer: operators that may follow the parentheses.
        """
        for name, operators in (("inner", inner), ("outer", outer)):
            if not operators or not set(operators) <= set(OPERATORS):
                raise BadEnvironment(f"calculator: {name}={operators!r}: give one or more of {' '.join(OPERATORS)}.")
        self.questions = questions
        self.first = first
        self.examples = examples
        self.inner = inner
        self.outer = outer
        self.calls: list[tuple[str, int, int]] = []
        self.given: int | None = None

    def tasks(self) -> Iterator[Question]:
        for number in range(self.first, self.first + self.questions):
            yield question(number, self.inner, self.outer)

    def prompt(self) -> list[Message]:
        examples = [question(-1 - number, self.inner, self.outer) for number in range(self.examples)]
        shown = [message for example in examples for message in solved(example)]
        return [*shown, {"role": "user", "content": str(self.task.prompt)}]

    @tool(parallel=False)
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.calls.append(("add", a, b))
        return a + b

    @tool(parallel=False)
    def subtract(self, a: int, b: int) -> int:
        """Subtract the second number from the first."""
        self.calls.append(("subtract", a, b))
        return a - b

    @tool(parallel=False)
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.calls.append(("multiply", a, b))
        return a * b

    @tool(parallel=False)
    def answer(self, value: int) -> str:
        """Give the answer."""
        self.given = value
        self.episode.end("answered")
        return "thank you"

    @reward
    def exact(self) -> bool:
        return self.given == self.task.value

    @reward(weight=0.2)
    def right_calls(self) -> float:
        """The share of the needed calls that were made before the first wrong call."""
        right = 0
        for made, needed in zip(self.calls, self.task.calls, strict=False):
            if tuple(made) != tuple(needed):
                break
            right += 1
        return right / len(self.task.calls)


def question(number: int, inners: str = "+", outers: str = "*") -> Question:
    """Return the question with this number; it is always the same."""
    rng = random.Random(f"calculator {number}")
    first, second, third = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
    inner, outer = rng.choice(inners), rng.choice(outers)
    middle = _apply(inner, first, second)
    value = _apply(outer, middle, third)
    return Question(
        id=f"calculator-{number}",
        prompt=f"What is ({first} {inner} {second}) {outer} {third}?",
        answer=str(value),
        calls=((OPERATORS[inner], first, second), (OPERATORS[outer], middle, third)),
        value=value,
    )


def solved(example: Question) -> Iterator[Message]:
    """The messages of an example that is solved turn by turn."""
    yield {"role": "user", "content": str(example.prompt)}
    results = [example.calls[1][1], example.value]
    steps = [(name, {"a": a, "b": b}, str(result)) for (name, a, b), result in zip(example.calls, results, strict=True)]
    for number, (name, arguments, result) in enumerate([*steps, ("answer", {"value": example.value}, "thank you")]):
        call_id = f"{example.id}-{number}"
        yield {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}],
        }
        yield {"role": "tool", "content": result, "tool_call_id": call_id, "name": name}


def _apply(operator: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]
