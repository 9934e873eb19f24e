"""Configuration of all tests: the sample of a sweep, the event loop, the order, and the engines.

`make test` plays the tests in three processes. Many tests wait, for an engine that starts or for a process, and a
fourth process makes the run no faster. Tests that share a real engine are one group in one process. They start with the
first tests of the run, since they take longest. Their order is: tests on `real_engine`, by its options; tests on
`engine`; tests on `doomed_engine`, which may end that engine. Tests with the marker `apart`, which start an engine of
their own, are a group in another process.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio.testing
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from runner.engines.vllm.engine import VllmEngine
from runner.models import demo_model
from runner.testing.engine_pool import PooledEngine
from tests import engine_starts, lanes, lasting, samples, sweeps, variables
from tests.engines.sharing import as_it_was
from tests.engines.small_model import small_model

# A slow machine fails no test.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("whole", deadline=None)

_process = psutil.Process()
_memory = 0
"""Memory of this process after the last collection between two tests, in bytes."""


# --- how much is played


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sweeps", "sweeps over templates, vocabularies, event loops and random cases")
    group.addoption("--sweeps", choices=("sampled", "whole"), default="sampled", help="a part of them, or all")
    group.addoption("--sweep-seed", type=int, default=sweeps.DEFAULT_SEED, help="which part and which random cases")
    parser.getgroup("clients").addoption("--clients", action="store_true", help="play with agent programs too")
    parser.getgroup("ray").addoption("--ray", action="store_true", help="play on Ray in this process: test_on_ray does")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option, whole = config.option, config.option.sweeps == "whole"
    if option.hypothesis_seed is None:
        option.hypothesis_seed = option.sweep_seed
    sweeps.begin(whole=whole, seed=option.sweep_seed)
    settings.load_profile("whole" if whole else "quick")
    # Hypothesis draws constants of the modules that are loaded, which depend on the tests that ran before.
    providers._get_local_constants = Constants
    if hasattr(config, "workerinput"):
        lasting.begin()
        # vLLM and torch get one core in each process, and the other processes get the other cores. The threads of both
        # libraries wait for one another by spinning: two threads on cores that are in use cost several times what one
        # thread costs. The first process has the tests that share an engine. Only one of the other processes has tests
        # that start an engine.
        cores, worker = sorted(os.sched_getaffinity(0)), int(config.workerinput["workerid"].removeprefix("gw"))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[min(worker, len(cores) - 1)]))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Room for 10 requests of 2,000 ids of the demo model in float32. vLLM fills its cache with zeros at its start: a
    # larger one takes seconds, and whole sweeps have up to eight engines at once on a machine of 24 GB.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # vLLM leaves the context of its sockets to the garbage collector, which may run in any later test or after the
    # last.
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context <zmq:ResourceWarning")
    warnings.filterwarnings("ignore", "Unclosed context <zmq", ResourceWarning)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure of a whole sweep at once, since its end may be an hour away."""
    if report.failed and sweeps.whole() and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"sweeps: {config.option.sweeps}, --sweep-seed={config.option.sweep_seed}"


# --- what a test must not change


@pytest.fixture(autouse=True)
def unchanged_variables() -> Iterator[None]:
    """Assert that a test restores the environment variables that programs of later tests read."""
    with variables.unchanged():
        yield


# --- on which event loop, and by which clock


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asyncio, but for tests with the marker `both_backends`."""
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    of_backends = metafunc.definition.get_closest_marker("both_backends") or sweeps.whole()
    if of_backends and _may_be_on_trio(metafunc):
        # This is a mark because pytest would otherwise ask anyio's own fixture of that name for its parameters.
        both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], scope="module")
        metafunc.definition.add_marker(both)


def _may_be_on_trio(metafunc: pytest.Metafunc) -> bool:
    """True if the test is asynchronous, can run on trio, and has no event loop set by itself or by its module."""
    alone = "session_engine" in metafunc.fixturenames or any(
        metafunc.definition.get_closest_marker(name) for name in ("engine", "ray", "asyncio_alone")
    )
    if alone or "anyio_backend" not in metafunc.fixturenames:
        return False
    own = any("anyio_backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    return not own and not hasattr(metafunc.module, "anyio_backend")


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that only the test moves; it is passed to `trio.run`, or to `anyio_backend`."""
    return trio.testing.MockClock()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that abandoned threads wait for; it is set after the test, so that they end."""
    event = threading.Event()
    yield event
    event.set()


# --- in which order, and in which process


def pytest_itemcollected(item: pytest.Item) -> None:
    # Markers are added here because `-m` selects before the hook below. `real_engine` alone does not count: tests of
    # the kit let it start a stand-in.
    if {"session_engine", "doomed_float32_engine"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.engine)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unplayed = [] if sweeps.whole() else ["whole"]
    if not config.option.ray:
        unplayed.append("ray")
    for name in unplayed:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(name)])
        items[:] = [item for item in items if not item.get_closest_marker(name)]
    left_out = samples.outside(items)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=_turn)
    lanes.write_groups(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector, which would go through all modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude torch, vLLM and all other imported objects from garbage collection.

    Tests that look for leaks collect several times. Without this, each collection visits a million objects that stay.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.scheduler(config, log)


_TURNS = ("doomed_engine", "session_engine", "doomed_float32_engine", "float32_engine", "real_engine")
"""Fixtures of tests that are played late. The tests of the first fixture are played last."""


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("apart"):
        return -1
    real = item.get_closest_marker("engine")
    # A test that takes its engine by a parameter names that engine in its marker.
    fixtures = {*getattr(item, "fixturenames", ()), *(real.args if real else ())}
    late = next((len(_TURNS) - place for place, name in enumerate(_TURNS) if name in fixtures), 0)
    return late + 1 if real else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    sweeps.seed_libraries()
    forks = bool(item.get_closest_marker("engine")) and not item.get_closest_marker("spawned")
    if not forks:
        engine_starts.end_forking()
    if item.get_closest_marker("engine"):
        engine_starts.fork_engines(forks=forks)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a shared real engine after the last test that uses it, and the cluster after its last test.

    The process then plays other tests, and an event loop that still exists would disturb them.
    """
    if _shared_by(item) and nextitem is not None and _shared_by(nextitem) != _shared_by(item):
        item.session._setupstate.teardown_exact(None)  # private; pytest 8 and 9 have it in this form


def pytest_runtest_logfinish() -> None:
    """Free models in reference cycles: the collector runs by the number of new objects, not by memory."""
    global _memory
    if _process.memory_info().rss > _memory + 2**29:
        gc.collect()
        _memory = _process.memory_info().rss


def _shared_by(item: pytest.Item) -> str:
    """The name of the group of tests that share an engine or a cluster with this test; "" without a group."""
    if item.get_closest_marker("ray"):
        return "ray"
    return "engine" if item.get_closest_marker("engine") and not item.get_closest_marker("apart") else ""


# --- engines


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The demo model's folder; converted at its first use."""
    return demo_model(say=print)


@pytest.fixture(scope="session")
def small_model_folder(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a fifth of the demo model, for tests in which the generated text does not matter."""
    return small_model(tmp_path_factory.mktemp("small-model"), demo_model_folder)


@pytest.fixture(scope="session")
def hugging_face_model(small_model_folder: Path) -> Any:
    """The small model in Transformers, in float32, as a reference for an engine. Tests do not change it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(small_model_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
async def session_engine(demo_model_folder: Path, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    """The real engine on the demo model, on the event loop of asynchronous tests, with places for 16."""
    async with VllmEngine("smollm2-135m", max_num_seqs=16, max_model_len=4096) as engine:
        yield engine


@pytest.fixture
async def engine(session_engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    """The same engine, for a test that leaves it unchanged."""
    async with as_it_was(session_engine):
        yield session_engine


@pytest.fixture
def doomed_engine(session_engine: VllmEngine) -> VllmEngine:
    """The same engine, for the last test on it, which ends it."""
    return session_engine


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the profiles of the engine in float32."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture
def doomed_float32_engine(
    real_engine: Callable[..., PooledEngine], small_model_folder: Path, profiles: Path
) -> PooledEngine:
    """The engine of the small model in float32, for the last test on it, which ends it."""
    return real_engine(
        model=small_model_folder,
        template="pythonic",
        dtype="float32",  # greedy ids do not depend on how requests are batched
        max_num_batched_tokens=512,  # a longer prompt is computed in pieces
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(profiles), "torch_profiler_with_stack": False},
        weight_transfer_config={"backend": "file"},
        worker_extension_cls="tests.engines.stale_worker.OwnWorker",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
    )


@pytest.fixture
def float32_engine(request: pytest.FixtureRequest) -> Iterator[PooledEngine]:
    """The same engine, for a test that leaves it unchanged."""
    engine: PooledEngine = request.getfixturevalue("doomed_float32_engine")
    with engine.home.wrap_async_context_manager(as_it_was(engine.inner)):
        yield engine
