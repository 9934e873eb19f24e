"""VLLM's side of engine control: pause, weights, sleep and profiles, each bounded by the engine's life."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.engines.control import EngineDriver, PauseMode
from runner.errors import BadControl, BadInput, EngineDead, EngineError

if TYPE_CHECKING:
    from runner.engines.vllm.engine import VllmEngine

__all__ = ["VllmDriver"]

_Answer = TypeVar("_Answer")

_LISTEN_SECONDS = 0.2


class Weights(Protocol):
    """How new weights come in; raises BadWeights while the engine is untouched, anything once it is not."""

    async def check(self, source: Any) -> Any: ...
    async def load(self, checked: Any) -> None: ...


class VllmDriver(EngineDriver):
    """Drives one `AsyncLLM`.

    Args:
        engine: it is running.
        llm: its `AsyncLLM`.
        weights: brings new ones into it.
    """

    def __init__(self, engine: VllmEngine, llm: Any, weights: Weights) -> None:
        self._engine = engine
        self._llm = llm
        self._weights = weights

    async def pause(self, mode: PauseMode) -> None:
        """Stand still. Shielded from where vLLM is asked to, which takes a step: a pause left half way would be late.

        `wait` is waited for here, since vLLM's own keeps those that it had queued, which then are of two versions.

        Raises:
            EngineDead: it died meanwhile.
        """
        if mode is PauseMode.WAIT:
            await self.answered("pause()", self._engine.until_sent())
        with anyio.CancelScope(shield=True):
            await self._pause(mode)
        await checkpoint_if_cancelled()

    async def _pause(self, mode: PauseMode) -> None:
        while True:
            await self.answered("pause()", self._llm.pause_generation(mode=mode.value, clear_cache=False))
            if mode is not PauseMode.ABORT or self._engine.sent_all:
                break  # else a request was on its way, and came after what was to cut it
        if mode is not PauseMode.KEEP:
            self._engine.nothing_open()

    async def resume(self) -> None:
        """Go on. Shielded: vLLM that goes on while it is said to stand still would be updated under its requests."""
        with anyio.CancelScope(shield=True):
            await self.answered("resume()", self._llm.resume_generation())

    async def check_weights(self, source: Any) -> Any:
        """What `load_weights` needs of them, compared with the model while it goes on.

        Raises:
            BadWeights: they do not fit; names the tensor.
        """
        return await self.answered("update_weights()", self._weights.check(source))

    async def load_weights(self, checked: Any, version: str) -> None:
        """Exchange the weights, stamp what is sampled from now on, and forget every cached prompt.

        Raises:
            EngineDead: it failed half way; the engine was ended, since its weights are no one's.
        """
        try:
            await self.answered("update_weights()", self._weights.load(checked))
            await self._stamp(version)
            await self.reset_prefix_cache()
        except EngineError as error:
            raise self._engine.die(f"the weights {version!r} could not be loaded: {error}", error) from error

    async def _stamp(self, version: str) -> None:
        if self._engine.stamps_itself:
            await self.answered("update_weights()", self._llm.update_weight_version(version))
        for stream in self._engine.open_streams:
            stream.stamp(version)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt; running requests compute theirs again.

        Raises:
            EngineError: vLLM did not.
        """
        # Without the running ones vLLM forgets nothing while anything runs, and answers no more than False.
        reset = self._llm.reset_prefix_cache(reset_running_requests=True)
        if not await self.answered("reset_prefix_cache()", reset):
            raise EngineError("reset_prefix_cache(): vLLM kept its cached prompts")

    def check_sleep(self, level: int) -> None:
        """A GPU's memory can be given up only where vLLM allocated it for that.

        Raises:
            BadControl: it was not; names the engine argument.
        """
        config = self._llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise BadControl(f"sleep({level}): start the engine with VllmEngine(enable_sleep_mode=True).")

    async def sleep(self, level: int) -> None:
        """Give memory up; on a CPU vLLM gives nothing up, and only stands still.

        Raises:
            EngineDead: it failed half way; the engine was ended, since part of its memory is gone.
        """
        try:
            await self._pause(PauseMode.ABORT)  # also what an earlier pause kept
            await self.answered("sleep()", self._llm.sleep(level))
        except EngineError as error:
            raise self._engine.die(f"it could not be put to sleep: {error}", error) from error

    async def wake(self, tags: Collection[str]) -> None:
        """Take memory back, and stand still: with the last part of it vLLM goes on by itself, but nothing is in it.

        Raises:
            EngineDead: it failed half way; the engine was ended.
        """
        try:
            await self.answered("wake()", self._llm.wake_up(list(tags)))
            await self._pause(PauseMode.ABORT)
        except EngineError as error:
            raise self._engine.die(f"it could not be woken: {error}", error) from error

    async def profile(self, *, on: bool) -> None:
        """Start or stop vLLM's profiler.

        Raises:
            BadControl: the engine was started without one; names the engine argument.
            EngineError: vLLM's profiler failed.
        """
        config = getattr(self._llm.vllm_config, "profiler_config", None)
        if config is None or config.profiler is None:
            raise BadControl(
                f"{'start' if on else 'stop'}_profile(): start the engine with VllmEngine(profiler_config="
                '{"profiler": "torch", "torch_profiler_dir": FOLDER}), where its traces go.'
            )
        with anyio.CancelScope(shield=True):
            call = self._llm.start_profile() if on else self._llm.stop_profile()
            await self.answered("start_profile()" if on else "stop_profile()", call)

    async def devices(self) -> list[str]:
        """A name for each worker: "cpu", or the UUID by which a driver and NeMo RL know a GPU (tried on no GPU).

        Raises:
            EngineError: the workers are without our extension.
        """
        names: list[str] = await self.answered("devices()", self._llm.collective_rpc("device_name", kwargs={}))
        return names

    async def answered(self, what: str, call: Awaitable[_Answer]) -> _Answer:
        """What vLLM's core answers; a dead one would let us wait for ever.

        Raises:
            EngineDead: it died before it did.
            EngineError: it answered with an error.
        """
        answers: list[_Answer] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._until_death, tasks.cancel_scope)
            try:
                answers.append(await call)
            except Exception as error:  # the border to vLLM, whose errors have no kind
                failure = error
            tasks.cancel_scope.cancel()
        if answers:
            return answers[0]
        if isinstance(failure, BadInput | EngineDead):
            raise failure
        if failure is None or self._llm.errored:
            raise self._engine._died(failure) from failure
        if isinstance(failure, EngineError):
            raise failure
        raise EngineError(f"{what}: {' '.join(str(failure).split())[:500]}") from failure

    async def _until_death(self, scope: anyio.CancelScope) -> None:
        while not self._llm.errored:  # noqa: ASYNC110  # vLLM tells nobody
            await anyio.sleep(_LISTEN_SECONDS)
        scope.cancel()
