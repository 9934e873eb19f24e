"""A scripted engine's side of its control: virtual time stands still, and a new version stamps what is sampled next."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from runner.engines.control import EngineDriver, PauseMode
from runner.errors import BadControl

if TYPE_CHECKING:
    from runner.engines.scripted.engine import ScriptedEngine

__all__ = ["ScriptedDriver"]


class ScriptedDriver(EngineDriver):
    """Pauses an engine's virtual time. It has no weights: any source is taken, only the version counts."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            await self._engine.until_sent()
        if mode is PauseMode.ABORT:
            self._cut()
        self._engine.ticker.hold()

    def _cut(self) -> None:
        for stream in self._engine.open_streams:
            stream.cut()

    async def resume(self) -> None:
        self._engine.ticker.release()

    async def check_weights(self, source: Any) -> None:
        """Nothing to compare them with."""

    async def load_weights(self, checked: Any, version: str) -> None:
        for stream in self._engine.open_streams:
            stream.stamp(version)

    async def reset_prefix_cache(self) -> None:
        """It has none."""

    async def sleep(self, level: int) -> None:
        """It has no memory to give up; what a pause kept is cut, as real memory would go under it."""
        self._cut()

    async def wake(self, tags: Collection[str]) -> None:
        """It has no memory to take back."""

    async def profile(self, *, on: bool) -> None:
        raise BadControl("a scripted engine has no profiler: profile a VllmEngine.")
