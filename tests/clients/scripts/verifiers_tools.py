"""Episodes with a calculator, played by verifiers for `tests/benchmarks/verifiers.py`.

usage: verifiers_tools.py, with lines of JSON on stdin. The first line is the set-up, and each further line is the
sampling of one round. It prints a line of JSON for each round.
"""

import json
import sys
import time

import uvloop
import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first."""
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def answer(value: int) -> str:
    """Give the answer."""
    return "thank you"


class Sums(vf.ToolEnv):
    """Environment with calls of the calculator, until the answer is given."""

    def __init__(self, **options) -> None:
        super().__init__(tools=[add, subtract, multiply, answer], **options)
        for each in self.tool_defs:
            each.strict = None  # strict tools are constrained by a grammar, and the other ways are not
        self.played = []

    async def env_response(self, messages, state, **kwargs):
        answers = await super().env_response(messages, state, **kwargs)
        if any(call.name == "answer" for call in messages[-1].tool_calls):
            state["final_env_response"] = answers
        return answers

    @vf.cleanup
    async def keep(self, state) -> None:
        self.played.append(state)


async def exact(completion, answer) -> float:
    """Return 1.0 if the last call returns the correct answer."""
    calls = [call for message in completion if message.role == "assistant" for call in message.tool_calls or ()]
    given = [json.loads(call.arguments).get("value") for call in calls if call.name == "answer"]
    return float(given[:1] == [int(answer)])


async def play(environment: Sums, given, sampling) -> dict:
    """Play a round. Return its times, and the ids of every turn of every episode."""
    environment.played.clear()
    client = ClientConfig(api_base_url=f"{given['url']}/v1", api_key_var="NO_KEY")
    began = time.process_time(), time.perf_counter()
    results = await environment.evaluate(
        client, given["model"], sampling_args={**given["sampling"], **sampling}, max_concurrent=given["concurrency"]
    )
    processor, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    errors = [str(state["error"]) for state in environment.played if state["error"]]
    if errors:
        raise SystemExit(f"{len(errors)} episodes failed: {errors[0]}")
    episodes = [
        [(list(step["tokens"]["prompt_ids"]), list(step["tokens"]["completion_ids"])) for step in state["trajectory"]]
        for state in environment.played
    ]
    rewards = [output["reward"] for output in results["outputs"]]
    return {"wall": wall, "processor": processor, "episodes": episodes, "right": sum(rewards)}


async def main() -> None:
    given = json.loads(sys.stdin.readline())
    environment = Sums(dataset=Dataset.from_list(given["rows"]), rubric=vf.Rubric([exact]), max_turns=given["turns"])
    for line in sys.stdin:
        print(json.dumps(await play(environment, given, json.loads(line))), flush=True)


uvloop.run(main())
