"""One episode misbehaves, in every way and in every hook: only it fails, and its 63 siblings are byte-identical."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from runner import Limits, Outcome, Run, ScriptedEngine, Trajectory, Turn, reward
from tests import sweeps
from tests.faults import suspects
from tests.faults.clocks import ASYNCIO, TRIO, put_forward
from tests.faults.comparing import by_key
from tests.faults.suspects import (
    AT_ONCE,
    BAD,
    EPISODE_COUNT,
    HOOKS,
    TOO_LONG_ASYNC,
    TOO_LONG_SYNC,
    AsyncPupils,
    Deed,
    Pupils,
    SyncPupils,
    speak,
)

pytestmark = [pytest.mark.anyio, pytest.mark.sample_cases(5), pytest.mark.slow]

WATCHDOG_SECONDS = 600.0
PAST_HOOK_LIMITS_SECONDS = 500.0
LIMITS = Limits(
    seconds=5000, setup_seconds=400, step_seconds=400, tool_seconds=400, reward_seconds=400, close_seconds=400
)


@pytest.fixture(params=[ASYNCIO, TRIO], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def _threads_are_released() -> Iterator[None]:
    suspects.released.clear()
    yield
    suspects.released.set()


async def play(environment: Pupils, limits: Limits = LIMITS) -> tuple[dict[str, Trajectory], list[str]]:
    """Return all 64 trajectories by task, and the run's faults. Time passes when the 63 siblings have ended."""
    played: dict[str, Trajectory] = {}
    engine = ScriptedEngine(speak, seed=3)
    with anyio.fail_after(PAST_HOOK_LIMITS_SECONDS + WATCHDOG_SECONDS):
        async with engine, Run(environment, engine, limits=limits, seed=11) as run:
            async for trajectory in run:
                played[trajectory.task.id] = trajectory
                if len(played) == EPISODE_COUNT - 1 and BAD not in played:
                    put_forward(PAST_HOOK_LIMITS_SECONDS)
            assert engine.stats().open == engine.stats().waiting == engine.stats().live_sessions == 0
    return played, list(run.summary.faults)


_undisturbed: dict[type[Pupils], dict[Any, Any]] = {}


async def undisturbed(environment: type[Pupils]) -> dict[Any, Any]:
    """The siblings of a run without a bad episode. They are played once, on the event loop of the first test."""
    if environment not in _undisturbed:
        played, _ = await play(environment())
        assert {trajectory.outcome for trajectory in played.values()} == {Outcome.COMPLETED}
        assert {trajectory.reward for trajectory in played.values()} == {1.0}
        _undisturbed[environment] = by_key(member for name, member in played.items() if name != BAD)
    return _undisturbed[environment]


async def assert_fails_alone(played: dict[str, Trajectory], faults: list[str], environment: Pupils) -> None:
    bad = played.pop(BAD)
    assert by_key(played.values()) == await undisturbed(type(environment))
    assert_is_no_success(bad, faults, environment)
    assert len(bad.error) < 10_000
    assert all(len(fault) < 10_000 for fault in faults)


def assert_is_no_success(bad: Trajectory, faults: list[str], environment: Pupils) -> None:
    hook, deed = environment.hook, environment.deed
    too_long = deed in (*TOO_LONG_ASYNC, *TOO_LONG_SYNC)
    ignored = deed is suspects.returns_100_mb and hook in ("setup", "close")
    if ignored or hook == "close" or (hook == "metric" and not too_long):
        assert (bad.outcome, bad.reward) == (Outcome.COMPLETED, 1.0)
        assert ignored or any(f"{BAD}" in fault and hook in fault for fault in faults), faults
    elif deed is suspects.returns_100_mb and hook != "reward":
        assert (bad.outcome, bad.limit) == (Outcome.CONTEXT_LIMIT, "context")
        assert bad.error or hook == "tool"
    elif hook == "tool" and deed in TOO_LONG_ASYNC:
        assert bad.outcome is Outcome.COMPLETED
        assert "took longer than 400 s" in bad.messages[2]["content"]
    else:
        assert (bad.outcome, bad.reward) == (Outcome.ENV_ERROR, None)
        assert bad.error


def each(deeds: list[Deed]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("deed", deeds, ids=[deed.__name__ for deed in deeds])


EVERYWHERE = [
    pytest.param(environment, hook, deed, id=f"{deed.__name__}-{hook}-{environment.__name__}")
    for deed in AT_ONCE
    for hook in HOOKS
    for environment in (SyncPupils, AsyncPupils)
]


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
@pytest.mark.parametrize(("environment", "hook", "deed"), sweeps.part(EVERYWHERE, 3))
async def test_fault_in_an_episode_fails_alone_beside_63_equal_siblings(
    environment: type[Pupils], hook: str, deed: Deed
) -> None:
    suspect = environment(hook, deed)
    played, faults = await play(suspect)
    await assert_fails_alone(played, faults, suspect)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
@each([deed for deed in AT_ONCE if deed is not suspects.returns_100_mb])
async def test_fault_in_a_rollout_fails_that_rollout_alone(deed: Deed) -> None:
    suspect = AsyncPupils("rollout", deed)
    played, faults = await play(suspect)
    await assert_fails_alone(played, faults, suspect)


@each(TOO_LONG_ASYNC)
async def test_slow_rollout_is_cut_by_the_episodes_time_alone(deed: Deed) -> None:
    played, _ = await play(AsyncPupils("rollout", deed), Limits(seconds=400))
    bad = played.pop(BAD)
    assert by_key(played.values()) == await undisturbed(AsyncPupils)
    assert (bad.outcome, bad.limit, bad.reward) == (Outcome.TIME_LIMIT, "seconds", None)


@pytest.mark.parametrize("deed", [suspects.raises, suspects.exits, suspects.recurses])
async def test_a_constructor_that_fails_once_fails_one_episode(deed: Deed) -> None:
    made = 0

    class Delicate(Pupils):
        def __init__(self) -> None:
            nonlocal made
            made += 1
            if made == 20:
                deed()
            super().__init__()

        def step(self, turn: Turn) -> None:
            return None

        @reward
        def said(self) -> bool:
            return True

    played, _ = await play(Delicate())
    assert Counter(trajectory.outcome for trajectory in played.values()) == {
        Outcome.COMPLETED: EPISODE_COUNT - 1,
        Outcome.ENV_ERROR: 1,
    }


@pytest.mark.parametrize("hook", HOOKS)
@each(TOO_LONG_ASYNC)
async def test_endless_wait_and_swallowed_cancellations_fail_alone(hook: str, deed: Deed) -> None:
    suspect = AsyncPupils(hook, deed)
    played, faults = await play(suspect)
    await assert_fails_alone(played, faults, suspect)


@pytest.mark.parametrize("hook", HOOKS)
@each(TOO_LONG_SYNC)
async def test_hang_in_sync_code_fails_alone_and_abandons_its_thread(hook: str, deed: Deed) -> None:
    suspect = SyncPupils(hook, deed)
    played, faults = await play(suspect)
    await assert_fails_alone(played, faults, suspect)
