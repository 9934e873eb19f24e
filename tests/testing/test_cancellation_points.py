"""Cancellation at every suspension point: each point is cancelled once, and each finding names its place."""

import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint

from runner.testing import cancel_everywhere, cancellation_points

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


async def test_every_suspension_point_is_cancelled_once_in_order() -> None:
    reached: list[int] = []

    async def scenario() -> None:
        reached.append(0)
        for step in range(1, 6):
            await checkpoint()
            reached[-1] = step

    assert await cancel_everywhere(scenario) >= 5
    # Before a cancellation at the n-th point, n - 1 steps were done. The last run is not cancelled.
    assert sorted(set(reached)) == list(range(6))
    assert reached == sorted(reached)


async def test_a_scenario_that_never_suspends_runs_once() -> None:
    runs: list[None] = []

    async def scenario() -> None:
        runs.append(None)

    assert await cancel_everywhere(scenario) == 0
    assert len(runs) == 1


async def test_child_tasks_are_cancelled_with_the_scenario() -> None:
    alive = 0

    async def child() -> None:
        nonlocal alive
        alive += 1
        try:
            for _ in range(3):
                await checkpoint()
        finally:
            alive -= 1

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            tasks.start_soon(child)

    def check() -> None:
        assert alive == 0

    assert await cancel_everywhere(scenario, check=check) >= 1


async def test_a_shield_is_left_before_the_cancellation_comes() -> None:
    shielded: list[bool] = []

    async def scenario() -> None:
        shielded.append(False)
        with anyio.CancelScope(shield=True):
            await cancel_shielded_checkpoint()
            await checkpoint()
            shielded[-1] = True
        await checkpoint()

    assert await cancel_everywhere(scenario) >= 3
    assert all(shielded)


async def async_check() -> None:
    await checkpoint()
    raise AssertionError("something is left")


def sync_check() -> None:
    raise AssertionError("something is left")


@pytest.mark.parametrize("check", [sync_check, async_check], ids=["sync", "async"])
async def test_failed_check_names_the_place_of_cancellation(check: Callable[[], Awaitable[None] | None]) -> None:
    async def scenario() -> None:
        await checkpoint()

    with pytest.raises(AssertionError, match="something is left") as caught:
        await cancel_everywhere(scenario, check=check)
    (note,) = caught.value.__notes__
    assert note.startswith("cancelled at suspension point 1, in test_failed_check_names_the_place_of_cancellation.")
    assert f"scenario ({__file__}:" in note


async def test_a_missing_cleanup_is_found_at_the_point_where_it_matters() -> None:
    taken = 0

    async def scenario() -> None:
        nonlocal taken
        await checkpoint()
        taken += 1
        await checkpoint()  # if it is cancelled here, it is never released
        taken -= 1

    def check() -> None:
        assert taken == 0

    with pytest.raises(AssertionError) as caught:
        await cancel_everywhere(scenario, check=check)
    assert "cancelled at suspension point" in caught.value.__notes__[0]
    assert taken == 1


async def test_scenario_error_reaches_the_test_with_its_suspension_point() -> None:
    async def scenario() -> None:
        try:
            await checkpoint()
        finally:
            raise ZeroDivisionError("while cleaning up")

    with pytest.raises(ZeroDivisionError, match="cleaning up") as caught:
        await cancel_everywhere(scenario)
    assert "cancelled at suspension point 1" in caught.value.__notes__[0]


async def swallows() -> None:
    with contextlib.suppress(BaseException):
        await checkpoint()


async def at_its_end() -> None:
    await checkpoint()
    await swallows()


async def and_goes_on() -> None:
    await swallows()
    await checkpoint()


@pytest.mark.parametrize(("scenario", "outcome"), [(at_its_end, "returned"), (and_goes_on, "continued")])
async def test_code_that_swallows_the_cancellation_is_named(
    scenario: Callable[[], Coroutine[Any, Any, None]], outcome: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        await cancel_everywhere(scenario)
    text = str(caught.value)
    assert text.startswith(f"cancelled in swallows ({__file__}:")
    assert f"but the scenario {outcome}: swallows ({__file__}:" in text
    assert "cancelled at suspension point" in caught.value.__notes__[0]


async def swallows_for_ever() -> None:
    while True:
        with contextlib.suppress(anyio.get_cancelled_exc_class()):
            await checkpoint()
            return


OVER: list[bool] = []


async def swallows_everything_for_ever() -> None:
    while not OVER:
        with contextlib.suppress(BaseException):
            await checkpoint()
            return


@pytest.mark.parametrize("scenario", [swallows_for_ever, swallows_everything_for_ever])
async def test_repeated_swallower_is_named_and_abandoned(
    scenario: Callable[[], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"{scenario.__name__} \(.*test_cancellation_points\.py:\d+\) swallowed the cancellation 1000 times"
    with anyio.fail_after(60), pytest.raises(AssertionError, match=said):
        await cancel_everywhere(scenario)
    # Python would warn about a generator that cannot be closed, so the test keeps it, and closes it here.
    monkeypatch.setattr(sys.modules[__name__], "OVER", [True])
    while cancellation_points._ABANDONED:
        cancellation_points._ABANDONED.pop().close()


async def test_shield_that_never_ends_is_reported_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.testing.cancellation_points._MAX_SUSPENSIONS", 1_000)

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            while True:
                await checkpoint()

    with (
        anyio.fail_after(60),
        pytest.raises(RuntimeError, match="has not ended after 1000 suspension points: give one that ends"),
    ):
        await cancel_everywhere(shielded)


async def test_deadline_in_a_shield_does_not_count_as_swallowing() -> None:
    fired: list[bool] = []

    async def scenario() -> None:
        with anyio.CancelScope(shield=True):
            await checkpoint()
            with anyio.move_on_after(0) as scope:
                await anyio.sleep_forever()
            fired.append(scope.cancelled_caught)

    assert await cancel_everywhere(scenario) >= 2
    assert all(fired)


async def test_cleanup_in_a_shield_does_not_count_as_swallowing() -> None:
    closed: list[int] = []

    async def scenario() -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(checkpoint)
                await checkpoint()
        except BaseException as error:
            with anyio.move_on_after(5, shield=True):
                await checkpoint()
                closed.append(1)
            raise error.with_traceback(None) from None

    assert await cancel_everywhere(scenario) >= 1
    assert closed
