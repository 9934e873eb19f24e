"""VLLM's side of engine control: pause, weights, sleep and profiles, each bounded by the engine's life."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.engines.control import EngineDriver, PauseMode
from runner.engines.vllm.core import VllmCore
from runner.errors import BadControl, EngineError

__all__ = ["VllmDriver"]


class Weights(Protocol):
    """How new weights come in; raises BadWeights while the engine is untouched, anything once it is not."""

    async def check(self, source: Any) -> Any: ...
    async def load(self, checked: Any) -> None: ...


class VllmDriver(EngineDriver):
    """Drives one vLLM."""

    def __init__(self, core: VllmCore, weights: Weights) -> None:
        self._core = core
        self._weights = weights

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            # Waited for here: vLLM's own keeps the requests that it had queued, which then are of two versions.
            await self._core.answered("pause()", self._core.until_sent())
        # Shielded from where vLLM is asked to, which takes a step: a pause left half way would come late.
        with anyio.CancelScope(shield=True):
            await self._pause(mode)
        await checkpoint_if_cancelled()

    async def _pause(self, mode: PauseMode) -> None:
        core = self._core
        while True:
            # The cache is kept: vLLM that is asked to clear it while a session is idle raises, and stays paused.
            await core.answered("pause()", core.llm.pause_generation(mode=mode.value, clear_cache=False))
            if mode is not PauseMode.ABORT or core.sent_all:
                break  # else a request was on its way, and came after what was to cut it
        if mode is not PauseMode.KEEP:
            core.nothing_open()

    async def resume(self) -> None:
        # Shielded: vLLM that goes on while it is said to stand still would be updated under its requests.
        with anyio.CancelScope(shield=True):
            await self._core.answered("resume()", self._core.llm.resume_generation())

    async def check_weights(self, source: Any) -> Any:
        return await self._core.answered("update_weights()", self._weights.check(source))

    async def load_weights(self, checked: Any, version: str) -> None:
        try:
            await self._core.answered("update_weights()", self._weights.load(checked))
            await self._stamp(version)
            await self.reset_prefix_cache()
        except EngineError as error:
            # vLLM has neither the old weights nor the new ones, and would die of a failed load at its next step.
            raise self._core.die(f"the weights {version!r} could not be loaded: {error}", error) from error

    async def _stamp(self, version: str) -> None:
        core = self._core
        if core.stamps_itself:
            await core.answered("update_weights()", core.llm.update_weight_version(version))
        # Kept by us in any case: a request that is cut before its end has no stamps of vLLM's.
        for request in core.requests:
            request.stamp(version)

    async def reset_prefix_cache(self) -> None:
        # Without the running ones vLLM forgets nothing while anything runs, and answers no more than False.
        reset = self._core.llm.reset_prefix_cache(reset_running_requests=True)
        if not await self._core.answered("reset_prefix_cache()", reset):
            raise EngineError("reset_prefix_cache(): vLLM kept its cached prompts")

    def check_sleep(self, level: int) -> None:
        # A GPU's memory can be given up only where vLLM allocated it for that.
        config = self._core.llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise BadControl(f"sleep({level}): start the engine with VllmEngine(enable_sleep_mode=True).")

    async def sleep(self, level: int) -> None:
        """Give memory up; on a CPU vLLM gives nothing up, and only stands still."""
        try:
            await self._pause(PauseMode.ABORT)  # also what an earlier pause kept
            await self._core.answered("sleep()", self._core.llm.sleep(level))
        except EngineError as error:
            # Part of its memory may be gone, and nothing says which.
            raise self._core.die(f"it could not be put to sleep: {error}", error) from error

    async def wake(self, tags: Collection[str]) -> None:
        try:
            await self._core.answered("wake()", self._core.llm.wake_up(list(tags)))
            # With the last part of its memory vLLM goes on by itself; whether it may is for the control to say.
            await self._pause(PauseMode.ABORT)
        except EngineError as error:
            raise self._core.die(f"it could not be woken: {error}", error) from error

    async def profile(self, *, on: bool) -> None:
        llm = self._core.llm
        config = getattr(llm.vllm_config, "profiler_config", None)
        name = f"{'start' if on else 'stop'}_profile()"
        if config is None or config.profiler is None:
            raise BadControl(
                f"{name}: start the engine with VllmEngine(profiler_config="
                '{"profiler": "torch", "torch_profiler_dir": FOLDER}), where its traces go.'
            )
        with anyio.CancelScope(shield=True):
            await self._core.answered(name, llm.start_profile() if on else llm.stop_profile())

    async def devices(self) -> list[str]:
        """A name for each worker: "cpu", or the UUID by which a driver and NeMo RL know a GPU (tried on no GPU)."""
        call = self._core.llm.collective_rpc("device_name", kwargs={})
        names: list[str] = await self._core.answered("devices()", call)
        return names
