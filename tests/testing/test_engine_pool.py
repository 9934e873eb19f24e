"""Real engines in tests: one alive at a time, reused by the next test, on an event loop of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.calculator import Calculator
from runner import BadOption, Limits, Outcome, Sampling, ScriptedEngine, VllmEngine
from runner.testing import VirtualClock, play, play_async, play_many, record, replay
from runner.testing.engine_pool import EnginePool, PooledEngine
from tests.testing.inner import run, run_apart
from tests.testing.test_playing import Sums

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

# A stand-in for the model, for tests of the code around it.
STAND_IN = """
import pytest
import runner.testing.engine_pool as home
from runner import ScriptedEngine

patch = pytest.MonkeyPatch()
patch.setattr(home, "make_engine", lambda says="42": ScriptedEngine(says))

def pytest_unconfigure():
    patch.undo()
"""


class Tests:
    """The runner of the tests."""

    name = "one"

    def __call__(self) -> str:
        return self.name


@pytest.fixture
def tests() -> Tests:
    return Tests()


@pytest.fixture
def pool(tests: Tests) -> Iterator[EnginePool]:
    pool = EnginePool(lambda says="stop": ScriptedEngine(says, record=True), tests)
    yield pool
    pool.close()


def test_plain_test_plays_several_times_on_one_pooled_engine(pool: EnginePool) -> None:
    engine = pool.engine()
    assert play(Sums, engine).text == play(Sums, engine).text == "stop"
    assert pool.engine() is engine


@pytest.mark.anyio
async def test_async_test_plays_on_a_pooled_engine_from_any_loop(pool: EnginePool) -> None:
    assert (await play_async(Sums, pool.engine())).text == "stop"


@pytest.mark.anyio
async def test_pooled_engine_in_the_loop_of_a_test_names_the_fix(pool: EnginePool) -> None:
    from runner import Run

    with pytest.raises(BadOption, match=r"runs on a separate loop.*`await play_async\(environment, real_engine\(\)\)`"):
        async with Run(Sums, pool.engine()):
            pass
    with pytest.raises(BadOption, match="running already"):
        async with pool.engine():
            pass


def test_engine_of_another_test_takes_the_place_of_the_first(pool: EnginePool, tests: Tests) -> None:
    first = pool.engine()
    tests.name = "another"
    second = pool.engine(says="3")
    assert (first.inner.running, second.inner.running) == (False, True)
    tests.name = "a third"
    assert pool.engine(says="3") is second


def test_two_pooled_engines_in_one_test_are_refused(pool: EnginePool) -> None:
    pool.engine()
    with pytest.raises(
        BadOption, match=r"real_engine\(says='3'\): this test has real_engine\(\) already, and only one model"
    ):
        pool.engine(says="3")


@pytest.mark.parametrize("options", [{}, {"says": "3"}])
@pytest.mark.parametrize("asked_by", ["one", "another"])
def test_dead_engine_is_started_again(pool: EnginePool, tests: Tests, asked_by: str, options: dict[str, str]) -> None:
    first = pool.engine()
    assert isinstance(first.inner, ScriptedEngine)
    first.home.call(first.inner.entered_runtime.die, "a worker was killed")
    tests.name = asked_by
    second = pool.engine(**options)
    assert second is not first
    assert play(Sums, second).text == options.get("says", "stop")


def test_virtual_clock_is_refused_for_a_pooled_engine(pool: EnginePool) -> None:
    with pytest.raises(BadOption, match=r"play\(clock=\): a real engine needs real time"):
        play(Sums, pool.engine(), clock=VirtualClock())


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.anyio
async def test_a_real_engine_of_ones_own_is_refused_on_trio() -> None:
    with pytest.raises(BadOption, match=r"vLLM works on asyncio alone, and this is trio: .*the fixture real_engine"):
        await VllmEngine().__aenter__()


TEST = """
def test_it(real_engine):
    assert play(Calculator, real_engine()).reward == 1
"""


def test_unmarked_test_without_option_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    result = run(pytester, TEST, "-rs", conftest=STAND_IN)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*real_engine starts a model: mark the test with @pytest.mark.engine, or run*"])


def test_marker_or_option_lets_the_test_run(pytester: pytest.Pytester) -> None:
    run(pytester, TEST, "--runner-engine", conftest=STAND_IN).assert_outcomes(passed=1)
    run(pytester, f"pytestmark = pytest.mark.engine\n{TEST}", conftest=STAND_IN).assert_outcomes(passed=1)


def test_two_engines_and_two_clocks_are_one_message_each(pytester: pytest.Pytester) -> None:
    test = """
def test_two(real_engine):
    real_engine()
    real_engine(says="43")

def test_time(real_engine, virtual_clock): pass
"""
    result = run(pytester, test, "--runner-engine", conftest=STAND_IN)
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "virtual_clock and real_engine: a real engine needs real time.*",
            "real_engine(says='43'): this test has real_engine() already*",
        ]
    )


EACH = """
def test_one(real_engine): play(Calculator, real_engine())
def test_two(real_engine): play(Calculator, real_engine())
def test_three(real_engine): play(Calculator, real_engine())
def test_four(real_engine): play(Calculator, real_engine())
"""


TWO_WORKERS = ("-p", "xdist", "-p", "runner.pytest_plugin", "--runner-engine", "-n", "2")


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the three processes import no plugins of others, which take more than half of their time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.usefixtures("few_plugins")
def test_one_of_several_workers_starts_models(pytester: pytest.Pytester) -> None:
    run_apart(pytester, EACH, *TWO_WORKERS, "--dist", "loadfile", conftest=STAND_IN).assert_outcomes(passed=4)


@pytest.mark.whole
@pytest.mark.usefixtures("few_plugins")
def test_second_worker_that_starts_a_model_fails_with_advice(pytester: pytest.Pytester) -> None:
    result = run_apart(pytester, EACH, *TWO_WORKERS, conftest=STAND_IN)
    result.assert_outcomes(passed=2, failed=2)
    message = "real_engine: gw? cannot start a model while * has one. *--dist loadfile*-m engine -n 0*"
    result.stdout.fnmatch_lines([message])


RECORDED = """
def test_recorded(recorded_engine):
    assert play(Calculator, recorded_engine(), task="6").reward == 1
"""


def test_recording_uses_real_engine_and_replays_without_it(pytester: pytest.Pytester) -> None:
    run(pytester, RECORDED, "--runner-engine", "--runner-record=once", conftest=STAND_IN).assert_outcomes(passed=1)
    run(pytester, RECORDED, conftest="").assert_outcomes(passed=1)


LIMITS: dict[str, Any] = {"limits": Limits(turns=2), "sampling": Sampling(max_tokens=16, temperature=0)}


@pytest.mark.engine
def test_recorded_real_engine_replays_the_same_tokens(float32_engine: PooledEngine, tmp_path: Path) -> None:
    recorded, file = record(float32_engine), tmp_path / "demo.json"
    played = play_many(Calculator, recorded, tasks=2, **LIMITS)
    recorded.save(file)
    again = play_many(Calculator, replay(file), tasks=2, **LIMITS)
    first, second = ([list(turn.token_ids) for each in some for turn in each.turns] for some in (played, again))
    assert first == second
    assert {each.outcome for each in again} <= {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT}


@pytest.mark.engine
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_the_real_engine_is_played_on_from_trio(float32_engine: PooledEngine, anyio_backend: str) -> None:
    assert (await play_async(Calculator, float32_engine, **LIMITS)).turns


@pytest.mark.whole
@pytest.mark.engine
def test_the_demo_model_plays_is_recorded_and_replayed_without_it(pytester: pytest.Pytester) -> None:
    test = """
from runner import FinishReason

LIMITS = dict(limits=Limits(turns=2), sampling=Sampling(max_tokens=16, temperature=0))

def test_plain(real_engine):
    trajectory = play(Calculator, real_engine(), **LIMITS)
    assert trajectory.outcome in ("completed", "turn_limit", "token_limit")

def test_recorded(recorded_engine):
    assert play_many(Calculator, recorded_engine(), tasks=2, **LIMITS)

@pytest.mark.anyio
async def test_from_trio(real_engine):
    assert (await play_async(Calculator, real_engine(), **LIMITS)).turns

@pytest.fixture
def anyio_backend():
    return "trio"
"""
    run_apart(pytester, test, "--runner-engine", "--runner-record=once").assert_outcomes(passed=3)
    result = run_apart(pytester, test)
    result.assert_outcomes(passed=1, skipped=2)
