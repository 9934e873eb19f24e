"""A mistake in an environment's class is an error when the class is defined, and the error contains the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runner import (
    BadEnvironment,
    Environment,
    Limits,
    Message,
    Outcome,
    Run,
    ScriptedEngine,
    Task,
    group_reward,
    metric,
    reward,
    tool,
)
from runner.environment.checks import as_environment


class Base(Environment):
    @reward
    def good(self) -> bool:
        return True

    def tasks(self) -> list[Task]:
        return [Task("one", "Hello.")]


def override_without_decorator() -> None:
    type("Sub", (Base,), {"good": lambda self: True})


def reward_with_parameters() -> None:
    def good(self: Any, text: str) -> bool:
        return True

    type("Sub", (Base,), {"good": reward(good)})


def weight_by_position() -> None:
    reward(0.1)  # type: ignore[call-overload]  # wrong on purpose


def weight_of_a_metric() -> None:
    metric(0.1)  # type: ignore[type-var]  # wrong on purpose


def metric_of_nothing() -> None:
    metric(None)  # type: ignore[type-var]  # wrong on purpose


def limits_as_a_dict() -> None:
    type("Sub", (Base,), {"limits": {"turns": 3}})


def rollout_that_is_not_async() -> None:
    type("Sub", (Base,), {"rollout": lambda self, conversation: None})


def step_without_a_turn() -> None:
    type("Sub", (Base,), {"step": lambda self: None})


def two_rewards_of_one_name() -> None:
    class Sub(Base):
        @reward
        def right(self) -> bool:
            return True

        @reward(weight=0.5)  # type: ignore[no-redef]  # wrong on purpose
        def right(self) -> bool:  # noqa: F811  # wrong on purpose
            return False


def metric_with_the_name_of_a_reward() -> None:
    class Sub(Base):
        @reward
        def right(self) -> bool:
            return True

        @metric  # type: ignore[no-redef]  # wrong on purpose
        async def right(self) -> float:  # noqa: F811  # wrong on purpose
            return 1


def group_reward_with_the_name_of_a_metric() -> None:
    class Sub(Base):
        @metric
        def right(self) -> float:
            return 1

        @group_reward  # type: ignore[no-redef]  # wrong on purpose
        def right(self, group: Any) -> list[float]:  # noqa: F811  # wrong on purpose
            return []


def two_tools_of_one_name() -> None:
    class Sub(Base):
        @tool
        def look(self, where: str) -> str:
            """Look."""
            return where

        @tool(parallel=False)  # type: ignore[no-redef]  # wrong on purpose
        def look(self, what: str) -> str:  # noqa: F811  # wrong on purpose
            """Look."""
            return what


def static_tool_with_the_name_of_a_reward() -> None:
    class Sub(Base):
        @staticmethod
        @tool
        def look(where: str) -> str:
            """Look."""
            return where

        @reward  # type: ignore[no-redef]  # wrong on purpose
        def look(self) -> float:  # noqa: F811  # wrong on purpose
            return 1


def two_rewards_in_a_nested_class() -> None:
    class Outer:
        class Sub(Base):
            @reward
            def right(self) -> bool:
                return True

            @reward  # type: ignore[no-redef]  # wrong on purpose
            def right(self) -> bool:  # noqa: F811  # wrong on purpose
                return False


def lost(name: str, value: Any) -> Callable[[], object]:
    return lambda: type("Sub", (Base,), {name: value}) and None


@pytest.mark.parametrize("name", ["tools", "task", "episode", "shared"])
def test_attribute_that_init_sets_and_episodes_replace_is_refused(name: str) -> None:
    class Sub(Base):
        def __init__(self) -> None:
            setattr(self, name, [len])

    for given in (Sub, Sub()):
        with pytest.raises(BadEnvironment, match=rf"Sub\.__init__\(\): self\.{name} = .*each episode sets {name}"):
            as_environment(given)


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lost("tools", [len]), r"Sub\.tools = \[.*each episode sets tools.*self\.tools \+= \[Tool\("),
        (lost("tools", property(lambda self: [])), r"Sub\.tools = <property"),
        (lost("task", None), r"Sub\.task = None: each episode sets task.*give it another name"),
        (lost("episode", 3), r"Sub\.episode = 3"),
        (lost("shared", {}), r"Sub\.shared = \{\}"),
        (two_rewards_of_one_name, r"Sub\.right is defined twice in its class, the second time with @reward; .*rename"),
        (metric_with_the_name_of_a_reward, r"Sub\.right is defined twice .* with @metric"),
        (group_reward_with_the_name_of_a_metric, r"Sub\.right is defined twice .* with @group_reward"),
        (two_tools_of_one_name, r"Sub\.look is defined twice .* with @tool"),
        (static_tool_with_the_name_of_a_reward, r"Sub\.look is defined twice .* with @reward"),
        (two_rewards_in_a_nested_class, r"Outer\.Sub\.right is defined twice"),
        (override_without_decorator, r"Sub\.good overrides a reward: decorate it with @reward, or write good = None"),
        (reward_with_parameters, r"Sub\.good: a reward is called as good\(self\)"),
        (weight_by_position, r"@reward decorates a method, not 0\.1; give a weight as @reward\(weight="),
        (weight_of_a_metric, r"@metric decorates a method, not 0\.1; a metric has no weight\."),
        (metric_of_nothing, r"@metric decorates a method, not None; a metric has no weight\."),
        (limits_as_a_dict, r"Sub\.limits = \{'turns': 3\}: give Limits\(\.\.\.\)"),
        (rollout_that_is_not_async, r"Sub\.rollout must be async"),
        (step_without_a_turn, r"Sub\.step: wrong signature .* besides self\. Write `def step\(self, turn\)`\."),
    ],
)
def test_a_wrong_definition_is_refused_with_its_fix(define: Callable[[], None], message: str) -> None:
    with pytest.raises(BadEnvironment, match=message):
        define()


def test_reward_may_be_overridden_shared_and_named_alike_elsewhere() -> None:
    class Sub(Base):
        @reward(weight=2.0)
        def good(self) -> bool:
            return super().good()

    class Other(Base):
        @reward
        def good(self) -> bool:
            return False

    def shared(self: Any) -> bool:
        return True

    marked = reward(shared)
    both = [type(name, (Environment,), {"shared": marked}) for name in ("One", "Two")]
    assert [scorer.weight for scorer in Sub.scorers] == [2.0]
    assert all(cls.scorers for cls in both)  # type: ignore[attr-defined]  # created by type()


@pytest.mark.anyio
async def test_generated_rewards_are_recorded_by_attribute_name() -> None:
    def at_least(length: int) -> Any:
        @reward
        def long_enough(self: Any) -> bool:
            return len(self.episode.text) >= length

        return long_enough

    class Lengths(Environment):
        short, long = at_least(1), at_least(100)

        def tasks(self) -> list[Task]:
            return [Task("one", "Hello.")]

    async with Run(Lengths(), ScriptedEngine("Hello.")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.rewards == {"short": 1.0, "long": 0.0}


def test_none_takes_a_reward_of_the_base_class_away() -> None:
    class Sub(Base):
        good = None  # type: ignore[assignment]  # the fix in the message

        @metric
        def length(self) -> float:
            return 1

    assert [scorer.name for scorer in Sub.scorers] == ["length"]
    with pytest.raises(BadEnvironment, match="Sub has no reward"):
        Run(Sub(), ScriptedEngine("Hello."))


@pytest.mark.anyio
async def test_agent_in_setup_does_not_replace_main() -> None:
    class Early(Base):
        async def setup(self) -> None:
            await self.episode.conversation("helper", prompt="Begin.").generate()

    async with Run(Early(), ScriptedEngine("Hello.")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.agent, trajectory.reward) == ("main", 1)
    assert run.summary.reward.count == 1


@pytest.mark.anyio
async def test_failed_setup_after_agent_turn_is_announced_as_main() -> None:
    class Broken(Base):
        async def setup(self) -> None:
            await self.episode.conversation("helper", prompt="Begin.").generate()
            raise ValueError("no")

    async with Run(Broken(), ScriptedEngine("Hello.")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.agent, trajectory.outcome, trajectory.reward) == ("main", "env_error", None)


def by_assignment() -> type[Environment[Any]]:
    class Assigned(Base):
        def setup(self) -> None:
            self.system_prompt = f"You play {self.task.id}."

    return Assigned


def by_property() -> type[Environment[Any]]:
    class PromptProperty(Base):
        @property
        def system_prompt(self) -> str:  # type: ignore[override]  # read only, since it is only read
            return f"You play {self.task.id}."

    return PromptProperty


def by_message() -> type[Environment[Any]]:
    class Messages(Base):
        def prompt(self) -> list[Message]:
            return [{"role": "system", "content": f"You play {self.task.id}."}, {"role": "user", "content": "Hello."}]

    return Messages


@pytest.mark.anyio
@pytest.mark.parametrize("define", [by_assignment, by_property, by_message])
async def test_a_system_prompt_may_depend_on_the_task(define: Callable[[], type[Environment[Any]]]) -> None:
    async with Run(define(), ScriptedEngine("Hello.")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert [message["content"] for message in trajectory.segments[0].messages] == ["You play one.", "Hello.", "Hello."]


def test_episode_attribute_before_setup_raises() -> None:
    class Limited(Base):
        @property
        def limits(self) -> Limits:  # type: ignore[override]  # read only, as above
            return Limits(turns=len(self.task.id))

    class Sharing(Base):
        def tasks(self) -> list[Task]:
            return list(self.shared)

    with pytest.raises(BadEnvironment, match=r"Limited\.task exists only in an episode, from setup\(\) on"):
        Run(Limited(), ScriptedEngine("Hello."))
    with pytest.raises(BadEnvironment, match=r"Sharing\.shared exists only in an episode"):
        Sharing().tasks()
    for name in ("task", "episode", "shared", "tools"):
        assert not hasattr(Base(), name)


def test_constructor_that_raises_is_refused_with_its_cause() -> None:
    class Unmade(Base):
        def __init__(self) -> None:
            len(5)  # type: ignore[arg-type]  # wrong on purpose

    with pytest.raises(BadEnvironment, match=r"Unmade\(\) raised TypeError: .* correct its __init__"):
        Run(Unmade, ScriptedEngine("Yes"))


def test_constructor_with_arguments_is_refused_with_the_fix() -> None:
    class Wants(Base):
        def __init__(self, level: int) -> None:
            self.level = level

    with pytest.raises(BadEnvironment, match=r"without arguments \(missing .*'level'\): give Wants\(\.\.\.\)"):
        Run(Wants, ScriptedEngine("Yes"))


def hook(self: Any) -> Any:
    """A hook that yields."""
    yield


async def colored(self: Any) -> Any:
    """A hook that is awaited."""


def weigh(self: Any) -> int:
    """Weigh it."""
    return 1


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"system_prompt": 5}, "system_prompt = 5: give a string or None"),
        ({"setup": hook}, "setup yields, so its body would never run"),
        ({"close": hook}, "close yields"),
        ({"lifespan": colored}, "lifespan never yields"),
        ({"weigh": property(tool(weigh))}, "weigh is a property: a tool must be callable"),
    ],
)
def test_invalid_member_is_refused_at_class_definition(members: dict[str, Any], said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        type("Wrong", (Base,), members)


@pytest.mark.parametrize("function", ["name", property(weigh)])
def test_tool_decorator_on_a_non_method_is_refused(function: Any) -> None:
    with pytest.raises(BadEnvironment, match=r"@tool decorates a method, .* @tool\(name=\.\.\.\)"):
        tool(function)


def test_non_numeric_seconds_of_a_tool_are_refused() -> None:
    def slow(self: Any) -> str:
        """Take long."""
        return ""

    with pytest.raises(BadEnvironment, match="seconds='5': give a number above 0"):
        type("Wrong", (Base,), {"slow": tool(seconds="5")(slow)})  # type: ignore[call-overload]  # wrong on purpose
