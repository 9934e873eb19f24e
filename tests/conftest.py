"""Shared by all tests: their sample, event loop and order, and the engines.

`make test` plays the tests in three processes: many wait, for an engine that starts or for a process, and a fourth one
makes it no faster. Those that share a real engine are one group, in one process, and begin with the
first, since they take longest: those on `real_engine` by their options, then those on `engine`, last those on
`doomed_engine`, which they may kill. Tests that start an engine for themselves, `apart`, are a group in another one.
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

from runner.engines.vllm.engine import VllmEngine
from runner.models import demo_model
from runner.testing.engine_pool import PooledEngine
from tests import engine_starts, lanes, lasting, sweeps, turns
from tests.engines.sharing import as_it_was
from tests.engines.small_model import small_model

# A machine that is busy with something else fails no test.
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
    if hasattr(config, "workerinput"):
        lasting.begin()
        # One core for vLLM and for torch, the others for the other lanes: their threads wait for one another by
        # spinning, and two of them on cores that are taken cost several times what one costs. The first process has
        # the tests that share an engine, and only one of the others has tests that start one.
        cores, worker = sorted(os.sched_getaffinity(0)), int(config.workerinput["workerid"].removeprefix("gw"))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[min(worker, len(cores) - 1)]))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Room for 16 requests of 2,000 ids in float32. vLLM fills its cache with zeros at its start, which takes seconds
    # where it is larger.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # vLLM leaves its sockets' context to the garbage collector, which comes by in any later test, or after the last.
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context <zmq:ResourceWarning")
    warnings.filterwarnings("ignore", "Unclosed context <zmq", ResourceWarning)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure of a whole sweep at once, since its end may be an hour away."""
    if report.failed and sweeps.whole() and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"sweeps: {config.option.sweeps}, --sweep-seed={config.option.sweep_seed}"


# --- on which event loop, and by which clock


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asyncio, but for tests with the marker `both_backends`."""
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    of_backends = metafunc.definition.get_closest_marker("both_backends") or sweeps.whole()
    if of_backends and _may_be_on_trio(metafunc):
        # As a mark, since anyio's own fixture of that name would be asked for its parameters otherwise.
        both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], scope="module")
        metafunc.definition.add_marker(both)


def _may_be_on_trio(metafunc: pytest.Metafunc) -> bool:
    """The test is asynchronous, of what works on trio too, and neither it nor its module says on what it runs."""
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
    # Here, since `-m` selects before the hook below.
    # `real_engine` alone is not one: tests of the kit have it start a stand-in.
    if {"session_engine", "doomed_float32_engine"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.engine)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if sweeps.whole() else ["whole"]
    if not config.option.ray:
        left_out.append("ray")
    for name in left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(name)])
        items[:] = [item for item in items if not item.get_closest_marker(name)]
    later = turns.of_others(items)
    config.hook.pytest_deselected(items=list(later))
    items[:] = [item for item in items if item not in later]
    items.sort(key=_turn)
    lanes.tell(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector, which would go through all modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take torch, vLLM and all else that was imported out of the garbage collector's sight.

    Whatever looks for leaks collects several times, and each time went through a million objects that stay.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.scheduler(config, log)


_TURNS = ("doomed_engine", "session_engine", "doomed_float32_engine", "float32_engine", "real_engine")
"""Fixtures of tests that come late, the last first."""


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("apart"):
        return -1
    real = item.get_closest_marker("engine")
    # A test that takes its engine by a parameter says with its marker which one that is.
    fixtures = {*getattr(item, "fixturenames", ()), *(real.args if real else ())}
    late = next((len(_TURNS) - place for place, name in enumerate(_TURNS) if name in fixtures), 0)
    return late + 1 if real else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    forks = bool(item.get_closest_marker("engine")) and not item.get_closest_marker("spawned")
    if not forks:
        engine_starts.end_forking()
    if item.get_closest_marker("engine"):
        engine_starts.fork_engines(forks=forks)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what the tests of a real engine share with the last of them, and the cluster with the last test on it.

    The process then runs other tests, and an event loop that still exists would be in the way of theirs.
    """
    if _shared_by(item) and nextitem is not None and _shared_by(nextitem) != _shared_by(item):
        item.session._setupstate.teardown_exact(None)  # private, and as pytest 8 and 9 have it


def pytest_runtest_logfinish() -> None:
    """Free models in reference cycles: by itself, the collector waits for new objects, not for new memory."""
    global _memory
    if _process.memory_info().rss > _memory + 2**29:
        gc.collect()
        _memory = _process.memory_info().rss


def _shared_by(item: pytest.Item) -> str:
    """The name of the group of tests that share something of the kind with this one; "" without a group."""
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
    """A fifth of the demo model, for tests to which it does not matter what is said."""
    return small_model(tmp_path_factory.mktemp("small-model"), demo_model_folder)


@pytest.fixture(scope="session")
def hugging_face_model(small_model_folder: Path) -> Any:
    """The small model in Transformers, in float32, to compare an engine with; no test changes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own affairs
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
    """The same, for a test that leaves it as it was."""
    async with as_it_was(session_engine):
        yield session_engine


@pytest.fixture
def doomed_engine(session_engine: VllmEngine) -> VllmEngine:
    """The same, for the last test, which ends it."""
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
        dtype="float32",  # greedy ids are the same however requests are batched
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
    """The same, for a test that leaves it as it was."""
    engine: PooledEngine = request.getfixturevalue("doomed_float32_engine")
    with engine.home.wrap_async_context_manager(as_it_was(engine.inner)):
        yield engine
