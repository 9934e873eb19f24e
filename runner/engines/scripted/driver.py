"""A scripted engine's side of its control: virtual time stands still, and a new version stamps what is sampled next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from runner.engines.control import EngineDriver, PauseMode
from runner.engines.scripted.core import ScriptedCore
from runner.errors import BadControl

__all__ = ["ScriptedDriver"]


class ScriptedDriver(EngineDriver):
    """Pauses an engine's virtual time. It has no weights: any source is taken, only the version counts."""

    def __init__(self, core: ScriptedCore) -> None:
        self._core = core

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            await self._core.until_sent()
        if mode is PauseMode.ABORT:
            self._core.cut()
        self._core.ticker.hold()

    async def resume(self) -> None:
        self._core.ticker.release()

    async def check_weights(self, source: Any) -> None:
        """A scripted engine has no weights to compare with."""

    async def load_weights(self, checked: Any, version: str) -> None:
        for request in self._core.requests:
            request.stamp(version)

    async def reset_prefix_cache(self) -> None:
        """A scripted engine has no prefix cache."""

    async def sleep(self, level: int) -> None:
        # There is no memory to give up, but what a pause kept is cut, as real memory would go under it.
        self._core.cut()

    async def wake(self, tags: Collection[str]) -> None:
        """A scripted engine gave no memory up."""

    async def profile(self, *, on: bool) -> None:
        raise BadControl("a scripted engine has no profiler: profile a VllmEngine.")
