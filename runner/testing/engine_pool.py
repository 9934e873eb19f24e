"""Real engines for tests: each runs on a separate event loop, one at a time, and serves tests on any loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from runner.engines.base import Engine
from runner.engines.wrapped_engine import WrappedEngine
from runner.errors import BadOption

__all__ = ["EnginePool", "PooledEngine", "make_engine"]

_WRONG_LOOP = (
    "A real engine belongs to one event loop, and the test kit's engine runs on a separate loop, never on the loop of "
    "a test. Play on it with `play(environment, real_engine())` in a plain `def test_...`, or with "
    "`await play_async(environment, real_engine())` in an async one."
)


def make_engine(**options: Any) -> Engine:
    """A small vLLM engine with the demo model; `options` are further options of `VllmEngine`."""
    from runner.engines.vllm.engine import VllmEngine

    return VllmEngine(**{"max_num_seqs": 16, "max_model_len": 4096, **options})


class PooledEngine(WrappedEngine):
    """A running engine with its event loop, on which `play` and `play_many` play their episodes."""

    def __init__(self, inner: Engine, home: BlockingPortal, loop: Any) -> None:
        super().__init__(inner)
        self.home = home
        """The portal that calls functions on the event loop of the engine."""
        self._loop = loop

    @property
    def running(self) -> bool:  # type: ignore[override]  # a property, to check the loop of its caller
        """True if the engine runs.

        Raises:
            BadOption: the caller is on another event loop; the message names the functions to use.
        """
        if _loop() is not self._loop:
            raise BadOption(_WRONG_LOOP)
        return self.inner.running

    async def __aenter__(self) -> Self:
        raise BadOption(f"This engine is running already. {_WRONG_LOOP}")

    async def __aexit__(self, *_: object) -> None: ...


class EnginePool:
    """A pool of at most one running engine, which is kept until a test needs an engine with other options.

    Args:
        make: a function that constructs an engine from options.
        who: a function that returns the name of the current test.
    """

    def __init__(self, make: Callable[..., Engine], who: Callable[[], str]) -> None:
        self._make = make
        self._who = who
        self._alive: PooledEngine | None = None
        self._options: dict[str, Any] | None = None
        self._used_by = ""
        self._open = ExitStack()

    def engine(self, **options: Any) -> PooledEngine:
        """The running engine with these options. If there is none, the current engine is stopped and a new one started.

        Raises:
            BadOption: this test already has a running engine with other options.
        """
        __tracebackhide__ = True
        alive = self._alive is not None and self._alive.inner.is_alive()
        if not alive or options != self._options:
            if alive and self._used_by == self._who():
                raise BadOption(
                    f"real_engine({_written(options)}): this test has real_engine({_written(self._options or {})}) "
                    f"already, and only one model runs at a time. Use the same options twice, or write two tests."
                )
            self.close()
            self._start(options)
        assert self._alive is not None
        self._used_by = self._who()
        return self._alive

    def close(self) -> None:
        """Stop the running engine, if there is one."""
        self._alive = self._options = None
        self._open.close()

    def _start(self, options: dict[str, Any]) -> None:
        inner = self._make(**options)
        with ExitStack() as opened:
            portal = opened.enter_context(start_blocking_portal(backend="asyncio"))
            opened.enter_context(portal.wrap_async_context_manager(inner))
            self._alive = PooledEngine(inner, portal, portal.call(asyncio.get_running_loop))
            self._options = options
            self._open = opened.pop_all()


def _loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
