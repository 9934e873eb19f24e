"""Several environments in one run: weights, and settings that stay separate."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envs.calculator import Calculator
from envs.guess_number import GuessNumber
from runner import (
    BadEnvironment,
    BadOption,
    Environment,
    Group,
    Limits,
    Outcome,
    Run,
    RunFile,
    ScriptedEngine,
    Task,
    Trajectory,
    group_reward,
    metric,
    reward,
)
from runner.cli import run as run_module
from runner.cli.app import app
from runner.interop import Mixture, judge
from runner.interop.dataset import Dataset
from runner.testing import ModelCall, call
from tests.repository import DOCS

pytestmark = pytest.mark.anyio


class Greeting(Environment):
    system_prompt = "Greet."
    limits = Limits(turns=2)

    def __init__(self, count: int = 6) -> None:
        self.count = count

    def tasks(self) -> Iterator[Task]:
        return (Task(id=str(number), prompt="hello") for number in range(self.count))

    @reward
    def correct(self) -> float:
        return float(self.episode.text == "hi")

    @metric
    def letters(self) -> int:
        return len(self.episode.text)


class Quick(Greeting):
    """Environment with a group reward, a shared resource, and another reward of the same name."""

    system_prompt = "Be quick."

    async def lifespan(self) -> AsyncIterator[dict[str, int]]:
        self.closed = False
        yield {"factor": 10}
        self.closed = True

    @reward
    def correct(self) -> float:
        return float(self.shared["factor"])

    @group_reward
    def rank(self, group: Group) -> list[float]:
        return [float(trajectory.index) for trajectory in group.trajectories]


async def played(mixture: Mixture, replies: Any = "hi", **options: Any) -> tuple[Run, list[Trajectory]]:
    run = Run(mixture, ScriptedEngine(replies), **options)
    async with run:
        return run, [each async for each in run]


def names(tasks: Any) -> str:
    return "".join(task.id[0] for task in tasks)


def test_tasks_are_taken_by_weight_until_all_are_played() -> None:
    mixture = Mixture({"a": Greeting(), "b": (Greeting(6), 2), "c": (Greeting(1), 0.5)})
    order = names(mixture.tasks())
    assert Counter(order[:6]) == {"b": 4, "a": 2}
    assert Counter(order) == {"a": 6, "b": 6, "c": 1}
    assert len({task.id for task in mixture.tasks()}) == 13


async def test_each_environment_keeps_its_prompt_rewards_and_groups() -> None:
    quick = Quick(2)
    run, trajectories = await played(Mixture({"plain": Greeting(2), "quick": quick}), group_size=2)
    assert quick.closed
    prompts = {"plain": "Greet.", "quick": "Be quick."}
    for each in trajectories:
        name = each.task.id.partition("/")[0]
        assert each.outcome is Outcome.COMPLETED, each.error
        assert each.messages[0]["content"] == prompts[name]
        assert each.metrics == {f"{name}.letters": 2}
        if name == "plain":
            assert (each.rewards, each.reward) == ({"plain.correct": 1.0}, 1.0)
        else:
            assert each.rewards == {"quick.correct": 10.0, "quick.rank": float(each.index)}
            assert each.reward == 10 + each.index
    assert {name: (mean.mean, mean.count) for name, mean in run.summary.environments.items()} == {
        "plain": (1.0, 4),
        "quick": (10.5, 4),
    }


async def test_each_environment_gets_its_own_ids() -> None:
    class Named(Greeting):
        @metric
        def number(self) -> int:
            return int(self.task.id)

    _, trajectories = await played(Mixture({"a": Named(2), "b": Named(1)}))
    numbers = {
        each.task.id: [value for name, value in each.metrics.items() if "number" in name] for each in trajectories
    }
    assert numbers == {"a/0": [0], "a/1": [1], "b/0": [0]}


async def test_each_environment_keeps_its_tools_and_limits() -> None:
    def reply(model_call: ModelCall) -> Any:
        return [call("add", a=1, b=1)] if "calculator" in model_call.prompt or "add" in model_call.prompt else "7"

    mixture = Mixture({"sums": Calculator(questions=1, examples=0), "game": GuessNumber(games=1, highest=3)})
    _, trajectories = await played(mixture, reply)
    by_name = {each.task.id.partition("/")[0]: each for each in trajectories}
    assert {name: (each.outcome, len(each.turns)) for name, each in by_name.items()} == {
        "sums": (Outcome.TURN_LIMIT, 6),
        "game": (Outcome.TURN_LIMIT, 12),
    }


async def test_weights_of_a_run_name_environment_and_reward() -> None:
    mixture = Mixture({"a": Greeting(1), "b": Greeting(1)})
    _, trajectories = await played(mixture, weights={"a.correct": 0.5})
    assert {each.task.id: each.reward for each in trajectories} == {"a/0": 0.5, "b/0": 1.0}


async def test_a_mixture_resumes_one_file(tmp_path: Path) -> None:
    made: Callable[[], Mixture] = lambda: Mixture({"a": Greeting(3), "b": (Quick(3), 2)})  # noqa: E731
    source = list(made().tasks())
    await played(made(), tasks=source[:3], group_size=2, file=tmp_path / "mixed.db")
    run, _ = await played(made(), tasks=source, group_size=2, file=tmp_path / "mixed.db")
    assert run.summary.episodes == 12
    with RunFile(tmp_path / "mixed.db") as stored:
        assert len(stored) == 12
        assert stored.header.arguments["b.weight"] == 2
        assert stored.header.arguments["a.count"] == 3


@dataclass(frozen=True)
class Leveled(Task):
    level: int = 0


class Levels(Environment[Leveled]):
    def tasks(self) -> Iterator[Leveled]:
        return (Leveled(id=str(level), prompt="hello", level=level) for level in (3, 7))

    @group_reward
    def rank(self, group: Group) -> list[float]:
        # the task is a Leveled
        return [float(each.task.level) for each in group.trajectories]  # type: ignore[attr-defined]


async def test_tasks_of_a_resumed_group_have_their_class(tmp_path: Path) -> None:
    made: Callable[[], Mixture] = lambda: Mixture({"a": Greeting(1), "levels": Levels()})  # noqa: E731
    options: dict[str, Any] = {"file": tmp_path / "mixed.db", "group_size": 2}
    await played(made(), indices=(0,), **options)
    await played(made(), **options)
    with RunFile(tmp_path / "mixed.db") as stored:
        rewards = sorted(each.reward or 0.0 for each in stored if each.task_id.startswith("levels"))
    assert rewards == [3, 3, 7, 7]


async def test_results_reach_the_source_that_listens() -> None:
    class Source:
        seen: list[str]

        def __iter__(self) -> Iterator[Task]:
            return iter([Task(id="x", prompt="hello")])

        def finished(self, trajectory: Trajectory) -> None:
            self.seen.append(trajectory.task.id)

    source = Source()
    source.seen = []

    class Listening(Greeting):
        def tasks(self) -> Any:
            return source

    await played(Mixture({"a": Greeting(2), "b": Listening()}))
    assert source.seen == ["b/x"]


async def test_a_task_of_no_environment_fails_alone() -> None:
    mixture = Mixture({"a": Greeting(1)})
    tasks = [Task(id="z/0", prompt="hello"), Task(id="a/0", prompt="hello")]
    _, trajectories = await played(mixture, tasks=tasks, breaker=1)
    by_id = {each.task.id: each for each in trajectories}
    assert by_id["z/0"].outcome is Outcome.ENV_ERROR
    assert "must begin with the name of an environment: a/" in by_id["z/0"].error
    assert by_id["a/0"].reward == 1


class Asynchronous(Greeting):
    async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]  # refused
        yield Task(id="a", prompt="hello")


def test_block_of_the_page_counts_by_environment(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (each for each in (DOCS / "environments.md").read_text().split("```python\n") if "Mixture({" in each)
    exec(compile(block.partition("```")[0], "environments.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("{'sums': 2, 'game': 4}")


def test_environments_that_cannot_be_mixed_are_refused() -> None:
    rows = [{"prompt": "hello"}]
    one, other = (Dataset(rows, score=judge("Polite?", engine=ScriptedEngine("1"))) for _ in range(2))
    options: list[tuple[Any, str]] = [
        ({}, "give a dict of names"),
        ([Greeting()], "give a dict of names"),
        ({"a/b": Greeting()}, "without a slash or dot"),
        ({"a": (Greeting(), 0)}, "the weight of 'a' is 0"),
        ({"a": (Greeting(), float("nan"))}, "the weight of 'a' is nan"),
        ({"a": one, "b": other}, "another engine for the agent 'judge'"),
    ]
    for given, said in options:
        with pytest.raises(BadOption, match=said):
            Mixture(given)
    for bad, said in [(Mixture({"a": Greeting()}), "is a mixture itself"), (int, "is not an Environment")]:
        with pytest.raises((BadEnvironment, BadOption), match=said):
            Mixture({"x": bad})  # type: ignore[dict-item]  # wrong on purpose
    with pytest.raises(BadEnvironment, match=r"tasks\(\) of 'x' is async"):
        Mixture({"x": Asynchronous()}).tasks()


def deltarunner(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, " ".join(done.output.split())


def test_several_environments_play_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module.run_command, "__defaults__", (lambda settings: ScriptedEngine("7"),))
    settings = ("--set", "guess_number.highest=7", "--set", "calculator.examples=0")
    code, said = deltarunner("run", "guess_number", "calculator:2", *settings, "-n", "6", "--file", "mixed.db")
    said += " ".join(capfd.readouterr().out.split())
    assert code == 0, said
    with RunFile(tmp_path / "mixed.db") as stored:
        assert Counter(row.id.partition("/")[0] for row in stored) == {"calculator": 4, "guess_number": 2}
    assert "guess_number " in said
    assert "calculator.exact" in said
    assert deltarunner("run", "calculator", "calculator:2")[1].endswith("'calculator' is named twice: name it once.")
    assert (
        "begin with an environment of the mixture: calculator.NAME, guess_number.NAME"
        in deltarunner("run", "calculator", "guess_number", "--set", "first=1")[1]
    )
    assert "Did you mean 'calculator'" in deltarunner("run", "guess_number", "calculater:3")[1]
