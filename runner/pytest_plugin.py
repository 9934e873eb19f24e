"""The pytest plugin: fixtures for tests of environments. Only `real_engine`, and recording from it, need a model.

It imports only pytest and the standard library; each fixture imports what it needs.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import pytest

if TYPE_CHECKING:
    from runner.engines.base import Engine
    from runner.testing.queued_engine import QueuedEngine
    from runner.testing.virtual_clock import VirtualClock
    from runner.testing.vocabulary import AwkwardTokenizer, PlainTokenizer
    from runner.testing.watchdog import LoopWatchdog

_MARKERS = (
    "scripted_engine(**settings): settings of the fixture `scripted_engine`, such as template='hermes', context=512.",
    "engine: the test may start a real engine; without this marker or --runner-engine, `real_engine` skips the test.",
)
_SKIP_REASON = "real_engine starts a model: mark the test with @pytest.mark.engine, or run pytest with --runner-engine"

_failed = pytest.StashKey[bool]()
_running = pytest.StashKey[str]()
_engine_lock = pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deltarunner", "deltarunner: tests of environments")
    group.addoption(
        "--runner-engine",
        action="store_true",
        help="also run tests with the fixture `real_engine` that do not have the marker `engine`",
    )
    group.addoption(
        "--runner-record",
        choices=("none", "once", "rewrite"),
        default="none",
        help="`recorded_engine` replays recordings and fails if one is missing (none, the default), "
        "records missing ones (once), or records all again (rewrite)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.session.stash[_running] = item.nodeid
    may_start = item.config.getoption("--runner-engine") or item.get_closest_marker("engine") is not None
    if "real_engine" in getattr(item, "fixturenames", ()) and not may_start:
        pytest.skip(_SKIP_REASON)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when in ("setup", "call") and report.failed:
        item.stash[_failed] = True
    played = _recent_episodes()
    if call.when == "call" and report.failed and played:
        from runner.testing.failure_report import transcripts

        report.sections.append(("Episodes played", transcripts(played)))
    if call.when == "teardown":
        played.clear()
    return report


# --- engines


@pytest.fixture
def scripted_engine(request: pytest.FixtureRequest) -> Iterator[QueuedEngine]:
    """An engine that replies with what the test enqueues with `say(...)`; unused replies fail the test."""
    from runner.testing.queued_engine import QueuedEngine

    marker = request.node.get_closest_marker("scripted_engine")
    with _fail_with_message():
        engine = QueuedEngine(**_settings(marker))
    engine.add_advice = "Add one with scripted_engine.say(...)"
    engine.drop_advice = "forget them with scripted_engine.clear()"
    yield engine
    leftovers = engine.leftovers()
    if leftovers:
        from runner.testing.failure_report import endings

        leftovers += f"\n{endings(trajectory for trajectory, other in _recent_episodes() if other is engine)}"
    _fail_unless_failed(request, engine.problems, leftovers.rstrip())


@pytest.fixture(scope="session")
def real_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """`real_engine(**options)`: vLLM with the demo model, or `real_engine(model=...)`; one runs at a time."""
    from runner.testing import engine_pool

    pool = engine_pool.EnginePool(
        lambda **options: engine_pool.make_engine(**options), lambda: request.session.stash[_running]
    )

    def started(**options: Any) -> Engine:
        __tracebackhide__ = True
        _claim_engine(request)
        with _fail_with_message():
            return pool.engine(**options)

    yield started
    pool.close()


@pytest.fixture
def recorded_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """`recorded_engine()`: an engine that replays the recording that `--runner-record` made of `real_engine()`."""
    from runner.testing.recordings import RecordingFixture

    cassette = RecordingFixture(request, record=request.config.getoption("--runner-record"))

    def recorded(source: Any = None, *, name: str = "", tokenizer: Any = None) -> Engine:
        __tracebackhide__ = True
        with _fail_with_message():
            return cassette.engine(source, name=name, tokenizer=tokenizer)

    yield recorded
    if not request.node.stash.get(_failed, False):
        with _fail_with_message():
            cassette.save()
        _fail_unless_failed(request, cassette.problems())


# --- vocabularies


@pytest.fixture
def byte_tokenizer() -> PlainTokenizer:
    """A vocabulary of bytes with a chat template; needs no download."""
    from runner.testing.vocabulary import PlainTokenizer

    return PlainTokenizer()


@pytest.fixture
def awkward_tokenizer() -> AwkwardTokenizer:
    """A vocabulary like `byte_tokenizer`, but ids change when they are decoded and encoded again."""
    from runner.testing.vocabulary import AwkwardTokenizer

    return AwkwardTokenizer()


# --- time and leaks


@pytest.fixture
def virtual_clock(request: pytest.FixtureRequest) -> VirtualClock:
    """A clock that jumps to the next deadline when everything waits: `play(..., clock=virtual_clock)`."""
    from runner.testing.virtual_clock import VirtualClock

    if "real_engine" in request.fixturenames:
        pytest.fail(
            "virtual_clock and real_engine: a real engine needs real time. Use one of the two, or play on a "
            "scripted_engine.",
            pytrace=False,
        )
    return VirtualClock()


@pytest.fixture
def loop_watchdog(request: pytest.FixtureRequest) -> Iterator[LoopWatchdog]:
    """A watchdog that fails the test if code blocks an event loop of its episodes; the message names the function."""
    from runner.testing.playing import ACTIVE_WATCHDOGS
    from runner.testing.watchdog import LoopWatchdog

    watchdog = LoopWatchdog()
    ACTIVE_WATCHDOGS.append(watchdog)
    yield watchdog
    ACTIVE_WATCHDOGS.remove(watchdog)
    _fail_unless_failed(request, watchdog.complaints())


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A check that fails a test that leaves threads, processes, tasks, files, or requests of `scripted_engine`."""
    from anyio.lowlevel import checkpoint

    from runner.runs.event_loop import on_event_loop
    from runner.testing.leaks import UNFINISHED_TASKS, Leaked
    from runner.testing.leaks import no_leaks as watched

    on_event_loop(checkpoint)  # the first event loop of a process opens a pipe that later event loops share
    UNFINISHED_TASKS.clear()
    engines = [request.getfixturevalue("scripted_engine")] if "scripted_engine" in request.fixturenames else []
    leaks: list[str] = []
    try:
        with watched(*engines):
            yield
    except Leaked as leaked:
        leaks += leaked.leaks
    leaks += UNFINISHED_TASKS
    _fail_unless_failed(request, [str(Leaked(leaks))] if leaks else [])


# --- shared by fixtures


def _claim_engine(request: pytest.FixtureRequest) -> None:
    """Fail the test if another worker of pytest-xdist has started an engine, since each would load a model."""
    __tracebackhide__ = True
    worker: str | None = getattr(request.config, "workerinput", {}).get("workerid")
    if worker is None or _engine_lock in request.session.stash:
        return
    # The lock is in the folder that the workers share. A lock is released when its worker ends; a marker file would
    # remain.
    folder = request.getfixturevalue("tmp_path_factory").getbasetemp().parent
    file = (folder / "runner-engine.lock").open("a+", encoding="utf-8")
    if not _locked(file):
        with file:
            file.seek(0)
            owner = (file.read().split() or ["another worker"])[-1]
        pytest.fail(
            f"real_engine: {worker} cannot start a model while {owner} has one. Let one worker run all tests that "
            "need it (in one file, pytest --dist loadfile), or run them in one process: pytest -m engine -n 0.",
            pytrace=False,
        )
    print(worker, file=file, flush=True)
    request.session.stash[_engine_lock] = file


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _settings(marker: pytest.Mark | None) -> dict[str, Any]:
    if marker is None:
        return {}
    if marker.args:
        pytest.fail(
            f"@pytest.mark.scripted_engine({', '.join(map(repr, marker.args))}): settings have names, such as "
            "template='hermes'; replies are given with scripted_engine.say(...).",
            pytrace=False,
        )
    from runner.testing.queued_engine import check_settings

    with _fail_with_message("@pytest.mark.scripted_engine: "):
        check_settings(marker.kwargs)
    return dict(marker.kwargs)


@contextmanager
def _fail_with_message(before: str = "") -> Iterator[None]:
    """Turn a `DeltarunnerError` of the block into a test failure that shows its message without a traceback."""
    __tracebackhide__ = True
    from runner.errors import DeltarunnerError

    try:
        yield
    except DeltarunnerError as error:
        raise pytest.fail.Exception(f"{before}{error}", pytrace=False) from None


def _fail_unless_failed(request: pytest.FixtureRequest, problems: list[str], leftovers: str = "") -> None:
    """Fail the test if there are problems or leftovers, unless it has already failed."""
    message = "\n".join([*problems, *([leftovers] if leftovers else [])])
    if message and not request.node.stash.get(_failed, False):
        pytest.fail(message, pytrace=False)


def _recent_episodes() -> Any:
    """The episodes that the test played; an empty list if the module that plays them was not imported."""
    playing = sys.modules.get("runner.testing.playing")
    return playing.RECENT_EPISODES if playing is not None else []
