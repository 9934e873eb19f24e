"""The environments that the author's API was designed for: each can be written without a further concept.

OpenEnv and MCP are represented by servers of tools, as an author sees them. tests/cluster plays all of these
environments on two workers.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import anyio
import openai
import pytest

from runner import (
    Conversation,
    Environment,
    EpisodeOver,
    Group,
    Limits,
    Outcome,
    Prompt,
    Task,
    Tool,
    ToolError,
    Trajectory,
    Turn,
    group_reward,
    metric,
    reward,
    tool,
)
from runner.options import Concurrency
from runner.testing import call
from tests.playing import play, play_all, tasks

pytestmark = pytest.mark.anyio


async def test_calculator_is_played_with_a_tool() -> None:
    class Calculator(Environment):
        """Answer arithmetic questions with a calculator."""

        system_prompt = "Use the calculator for every operation."

        def tasks(self) -> list[Task]:
            return [Task(id=str(n), prompt=f"What is {n} * {n + 7}?", answer=str(n * (n + 7))) for n in range(3)]

        @tool
        def multiply(self, a: int, b: int) -> int:
            """Multiply two integers."""
            return a * b

        @reward
        def correct(self) -> bool:
            return self.task.answer in self.episode.text.split()

    def model(turn: Any) -> Any:
        n = int(turn.episode.split("#")[0])
        return call("multiply", a=n, b=n + 7) if turn.turn == 0 else f"It is {n * (n + 7)}"

    assert Calculator().multiply(6, 7) == 42
    assert [t.reward for t in await play_all(Calculator, model)] == [1.0] * 3


async def test_text_game_is_played_by_its_steps() -> None:
    class Maze(Environment):
        limits = Limits(turns=10)

        def tasks(self) -> list[Task]:
            return [Task(id="maze", prompt="You are at 0. Get to 3. Say left or right.")]

        def setup(self) -> None:
            self.position = 0

        def step(self, turn: Turn) -> str | None:
            self.position += {"left": -1, "right": 1}.get(turn.text, 0)
            return None if self.position == 3 else f"You are at {self.position}."

        @reward
        def found(self) -> bool:
            return self.position == 3

    trajectory = await play(Maze, lambda turn: "right")
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 3)


async def test_customer_service_is_played_with_a_simulated_user() -> None:
    class Shop(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="refund", prompt="Hello", info={"wants": "a refund of order 7"})]

        def setup(self) -> None:
            self.orders = {7: "paid"}
            wants = self.task.info["wants"]
            self.user = self.episode.conversation("user", system_prompt=f"You want {wants}. Say DONE when you have it.")

        @tool
        def refund(self, order: int) -> str:
            """Refund an order."""
            if order not in self.orders:
                raise ToolError(f"no order {order}")
            self.orders[order] = "refunded"
            return "refunded"

        async def step(self, turn: Turn) -> str | None:
            self.user.add(turn.text)
            said = (await self.user.generate()).text
            return None if "DONE" in said else said

        @reward
        def refunded(self) -> bool:
            return self.orders == {7: "refunded"}

    model = {
        "main": ["Which order?", call("refund", order=8), call("refund", order=7), "It is refunded."],
        "user": ["Order 7.", "DONE, thanks"],
    }
    trajectory = await play(Shop, model)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)


async def test_code_execution_stays_within_a_shared_limit() -> None:
    running, most = 0, 0

    class Code(Environment):
        def tasks(self) -> list[Task]:
            return tasks(6)

        @tool(seconds=10)
        async def python(self, code: str) -> str:
            """Run a program and give what it prints."""
            nonlocal running, most
            async with self.episode.limiter("sandbox", 2):
                running += 1
                most = max(most, running)
                await anyio.lowlevel.checkpoint()
                with redirect_stdout(io.StringIO()) as printed:
                    exec(code, {})
                running -= 1
            return printed.getvalue()

        @reward
        def right(self) -> bool:
            return self.episode.text == "4"

    played = await play_all(Code, [call("python", code="print(2 + 2)"), "4"])
    assert [t.reward for t in played] == [1.0] * 6
    assert most <= 2


async def test_retrieval_shares_one_index_among_episodes() -> None:
    built = 0

    class Search(Environment):
        shared: dict[str, str]

        @contextmanager
        def lifespan(self) -> Iterator[dict[str, str]]:
            nonlocal built
            built += 1
            yield {"paris": "Paris is the capital of France."}

        def tasks(self) -> list[Task]:
            return tasks(3)

        @tool
        def search(self, query: str) -> list[str]:
            """Find passages."""
            return [text for word, text in self.shared.items() if word in query.lower()]

        @reward
        def right(self) -> bool:
            return "France" in self.episode.text

    played = await play_all(Search, [call("search", query="Paris?"), "France"])
    assert ([t.reward for t in played], built) == ([1.0] * 3, 1)


async def test_self_play_rewards_both_trained_sides() -> None:
    class Duel(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="duel", prompt="Say a number. The higher one wins.")]

        async def rollout(self, conversation: Conversation) -> None:
            other = self.episode.conversation("other", prompt=self.task.prompt, train=True)
            self.said = {agent.name: int((await agent.generate()).text) for agent in (conversation, other)}

        @reward
        def won(self) -> dict[str, float]:
            best = max(self.said.values())
            return {agent: float(number == best) for agent, number in self.said.items()}

    main, other = await play_all(Duel, {"main": "3", "other": "5"})
    assert (main.reward, other.reward) == (0.0, 1.0)


async def test_group_reward_compares_the_scores_of_a_judge() -> None:
    class Jokes(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="joke", prompt="Tell a joke.")]

        @reward
        async def funny(self) -> float:
            judge = self.episode.conversation("judge", system_prompt="Rate the joke from 0 to 9.")
            judge.add(self.episode.text)
            return float((await judge.generate()).text) / 9

        @group_reward(weight=0.5)
        def best(self, group: Group) -> list[float]:
            scores = [t.rewards["funny"] or 0.0 for t in group.trajectories]
            return [float(score == max(scores)) for score in scores]

    model = {"main": lambda turn: "ha" * int(turn.episode[-1]), "judge": lambda turn: str(turn.prompt.count("ha"))}
    played = await play_all(Jokes, model, group_size=3)
    by_index = sorted(played, key=lambda t: t.index)
    assert [t.rewards["best"] for t in by_index] == [0.0, 0.0, 1.0]


async def test_environment_changes_tools_between_turns() -> None:
    class Doors(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="doors", prompt="Get out.")]

        async def rollout(self, conversation: Conversation) -> None:
            def open_door() -> str:
                """Open the door."""
                self.episode.end("out")
                return "You are out."

            turn = await conversation.generate()
            conversation.add(*await conversation.call_tools(turn))
            conversation.replace(tools=[Tool(open_door)])
            await self.episode.answer(await conversation.generate())

        @tool
        def find_key(self) -> str:
            """Look for the key."""
            return "You have the key."

        @reward
        def out(self) -> bool:
            return self.episode.ended

    trajectory = await play(Doors, [call("find_key"), call("open_door")])
    assert (trajectory.reward, len(trajectory.segments), trajectory.reason) == (1.0, 2, "out")


async def test_long_conversation_is_compacted_to_its_context() -> None:
    class Long(Environment):
        limits = Limits(context=400)

        def tasks(self) -> list[Task]:
            return [Task(id="long", prompt="Remember the word: kiwi.")]

        async def rollout(self, conversation: Conversation) -> None:
            for page in range(8):
                conversation.add(f"Page {page}: " + "x" * 60)
                if await conversation.remaining() < 100:
                    conversation.replace("The word was kiwi. " + conversation.messages[-1]["content"])
                await conversation.generate()

        @reward
        def went_on(self) -> bool:
            return len(self.episode.turns) == 8

    trajectory = await play(Long, lambda turn: "I see")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert len(trajectory.segments) > 2
    assert all(len(segment.log) <= 400 for segment in trajectory.segments)


class Walk:
    """An environment with Gymnasium's interface."""

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.at = 0
        self.goal = random.Random(seed).choice([-2, 2])
        return self.goal, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += 1 if action else -1
        return self.at, float(self.at == self.goal), abs(self.at) == 2, False, {}


async def test_gymnasium_environment_is_played_by_its_steps() -> None:
    class Gym(Environment):
        def tasks(self) -> list[Task]:
            return tasks(4)

        def setup(self) -> None:
            self.walk = Walk()
            self.total = 0.0
            self.goal, _ = self.walk.reset(seed=self.episode.rng.randrange(2**31))

        def prompt(self) -> Prompt:
            return f"Walk to {self.goal}: answer 0 for left, 1 for right."

        def step(self, turn: Turn) -> str | None:
            observation, gained, terminated, truncated, _ = self.walk.step(int(turn.text))
            turn.reward = gained
            self.total += gained
            return None if terminated or truncated else str(observation)

        @reward
        def total_reward(self) -> float:
            return self.total

    played = await play_all(Gym, lambda turn: "0" if "Walk to -2" in turn.prompt else "1")
    assert [t.reward for t in played] == [1.0] * 4
    assert [[turn.reward for turn in t.turns] for t in played] == [[0.0, 1.0]] * 4


class Server:
    """A server of tools and an environment over a stream, like MCP and OpenEnv. It answers in its own task."""

    def __init__(self) -> None:
        self.send, self._receive = anyio.create_memory_object_stream[Any]()

    async def serve(self) -> None:
        async with self._receive:
            async for name, arguments, reply in self._receive:
                reply.append({"list": [SCHEMA], "add": sum(arguments.values())}[name])
                reply[0].set()

    async def ask(self, name: str, **arguments: int) -> Any:
        reply: list[Any] = [anyio.Event()]
        await self.send.send((name, arguments, reply))
        await reply[0].wait()
        return reply[1]


SCHEMA = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


@asynccontextmanager
async def connected() -> AsyncIterator[Server]:
    server = Server()
    async with anyio.create_task_group() as group, server.send:
        group.start_soon(server.serve)
        yield server
        group.cancel_scope.cancel()


async def test_session_opened_in_setup_brings_tools_of_its_server() -> None:
    class Served(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="sum", prompt="2 + 3?")]

        async def setup(self) -> None:
            self.server = await self.episode.exit_stack.enter_async_context(connected())
            for made in await self.server.ask("list"):
                self.tools.append(self.remote(made))

        def remote(self, made: dict[str, Any]) -> Tool:
            async def ask(**arguments: int) -> Any:
                return await self.server.ask(made["name"], **arguments)

            return Tool(ask, name=made["name"], description=made["description"], parameters=made["inputSchema"])

        @reward
        async def right(self) -> bool:
            return self.episode.text == str(await self.server.ask("add", a=2, b=3))

    trajectory = await play(Served, [call("add", a=2, b=3), "5"])
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")


async def test_remote_environment_is_stepped_over_a_connection() -> None:
    class Remote(Environment):
        def tasks(self) -> list[Task]:
            return [Task(id="count", prompt="Count to 3.")]

        async def setup(self) -> None:
            self.server = await self.episode.exit_stack.enter_async_context(connected())
            self.total = 0

        async def step(self, turn: Turn) -> str | None:
            self.total = await self.server.ask("add", a=self.total, b=int(turn.text))
            return str(self.total) if self.total < 3 else None

        @reward
        def counted(self) -> bool:
            return self.total == 3

    assert (await play(Remote, lambda turn: "1")).reward == 1.0


@pytest.mark.asyncio_alone
async def test_agent_plays_through_an_openai_endpoint() -> None:
    class Agent(Environment):
        def tasks(self) -> list[Task]:
            return tasks(4)

        async def rollout(self, conversation: Conversation) -> None:
            async with (
                self.episode.serve(train=True) as endpoint,
                openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
            ):
                messages: list[Any] = [{"role": "user", "content": str(self.task.prompt)}]
                for _ in range(2):
                    said = await client.chat.completions.create(model="any", messages=messages)
                    messages.append({"role": "assistant", "content": said.choices[0].message.content})
                    messages.append({"role": "user", "content": "And now?"})

        @reward
        def went_on(self) -> bool:
            return [turn.text for turn in self.episode.turns] == ["First.", "Second."]

    played = await play_all(Agent, ["First.", "Second."])
    assert [t.reward for t in played] == [1.0] * 4


async def test_curriculum_raises_its_level_by_results() -> None:
    class Levels:
        level = 0

        async def __aiter__(self) -> AsyncIterator[Task]:
            while self.level < 3:
                yield Task(id=f"level {self.level}", prompt="?", info={"level": self.level})

        def finished(self, trajectory: Trajectory) -> None:
            self.level += trajectory.reward == 1.0

    class Solved(Environment):
        @reward
        def solved(self) -> bool:
            return True

        @metric
        def level(self) -> float:
            return float(self.task.info["level"])

    played = await play_all(Solved, "Yes", tasks=Levels(), concurrency=Concurrency(episodes=1))
    assert {t.metrics["level"] for t in played} == {0.0, 1.0, 2.0}


@dataclass(frozen=True)
class Exam(Task):
    value: int = 0


async def test_tool_ends_its_episode() -> None:
    class Submit(Environment[Exam]):
        tool_choice = "required"
        given: int | None = None

        def tasks(self) -> list[Exam]:
            return [Exam(id="exam", prompt="6 * 7?", value=42)]

        @tool
        def answer(self, value: int) -> str:
            """Give the answer."""
            self.given = value
            self.episode.end("answered")
            return "thank you"

        @reward
        def right(self) -> bool:
            return self.given == self.task.value

    trajectory = await play(Submit, [call("answer", value=42)])
    assert (trajectory.reward, trajectory.reason, len(trajectory.turns)) == (1.0, "answered", 1)


async def test_rollout_that_reraises_a_limit_is_turn_limit_and_scored() -> None:
    class Whole(Environment):
        limits = Limits(turns=2)

        def tasks(self) -> list[Task]:
            return tasks(1)

        async def rollout(self, conversation: Conversation) -> None:
            try:
                while True:
                    conversation.add(json.dumps({"said": (await conversation.generate()).text}))
            except EpisodeOver:
                self.noticed = True
                raise

        @reward
        def right(self) -> bool:
            return self.noticed

    trajectory = await play(Whole, lambda turn: "Yes")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TURN_LIMIT, 1.0)
