"""One vLLM that runs: its requests, what its trainer has it do, and its death, which ends every wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.engines.adapters import AdapterVersion
from runner.engines.base import GenerationRequest
from runner.engines.gate import AdmissionGate
from runner.engines.runtime import EngineRuntime, OpenRequest
from runner.engines.state import PauseMode
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.own_scores import OwnScores
from runner.engines.vllm.parallel import call_all_workers
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker import turn_hold
from runner.errors import BadControl, BadInput, EngineDead, EngineError, RequestRejected
from runner.logs import logger_for
from runner.options import Sampling

__all__ = ["ABORT_SECONDS", "VllmRuntime", "first_version"]

ABORT_SECONDS = 2.0
"""How long the end of a request may take that is shielded from cancellation."""

_FIRST_VERSION = "0"  # where vLLM has none of its own
_LISTEN_SECONDS = 0.2  # how soon a death is heard by who waits for an answer

_log = logger_for("engines")
_NUMBERS = itertools.count()  # of all engines, since several may be over one vLLM

_Answer = TypeVar("_Answer")


class VllmRequest(OpenRequest, Protocol):
    """What this runtime asks of the stream of a request besides."""

    @property
    def sent_all(self) -> bool: ...


class VllmRuntime(EngineRuntime[VllmRequest]):
    """A vLLM from its start to its end; a request is inside until its stream is left."""

    adapters: VllmAdapters

    def __init__(
        self,
        process: VllmProcess,
        llm: Any,
        weights: VllmWeights,
        *,
        gate: AdmissionGate,
        context: int,
        as_vllm: Callable[[GenerationRequest], tuple[Any, Any]],
        version: str,
    ) -> None:
        super().__init__(gate, VllmAdapters(llm, process.model, self.answered), context=context, version=version)
        self.process = process
        if self.progress is not None:
            process.stats.on_progress = self.progress.note
        self.llm = llm
        """The `AsyncLLM`; None once the engine was left."""
        self.weights = weights
        self.stamps_itself = _stamps(llm)
        """Whether vLLM says which weights sampled which ids; before 0.32 it does not, and we do."""
        self.own_scores: OwnScores | None = None
        """The engine's scores around an update; None where it cannot score ids while turns are held."""
        self.reload_check = False
        """Whether the engine's own weights are loaded once more before its first update."""
        self._as_vllm = as_vllm
        self._stopped = False
        self._death: EngineDead | None = None

    # --- one request

    async def send(
        self, request: GenerationRequest, adapter: AdapterVersion | None = None, *, rank: int | None = None
    ) -> Any:
        """Send a request to vLLM; gives the collector that its deltas are read from.

        Args:
            request: what is to be sampled.
            adapter: what it is to be sampled with.
            rank: the data-parallel rank that it was let in to; vLLM by itself would send turns of one episode to all of
                them, where the cache has nothing of the turns before.

        Raises:
            RequestRejected: vLLM refuses the request.
            EngineDead: the engine is gone.
        """
        # vLLM does not make names unique, and one abort would end both.
        name = f"{request.name}#{next(_NUMBERS)}"
        llm = self.llm
        routing = {"data_parallel_rank": rank} if len(self.gate.ranks) > 1 else {}
        sent = False
        try:
            prompt, parameters = self._as_vllm(request)
            lora = self.adapters.request(adapter)
            # Shielded, since a request half sent could not be taken back.
            with anyio.CancelScope(shield=True):
                collector = await llm.add_request(name, prompt, parameters, lora_request=lora, **routing)
            sent = True
        except Exception as error:  # the border to vLLM, which refuses with errors of many kinds
            if llm.errored:
                raise self.death_error(error) from error
            raise RequestRejected(f"{request.name}: {error}") from error
        finally:
            if not sent:
                with anyio.move_on_after(ABORT_SECONDS, shield=True):
                    await llm.abort(name)
        return collector

    async def drop(self, collector: Any) -> None:
        """End a request, finished or not; what it sampled and nobody read is left in the collector."""
        # By the id that vLLM gave it, which is unique, and not by our name for it.
        await self.llm.abort(collector.request_id, internal=True)

    @property
    def sent_all(self) -> bool:
        """Whether every request inside was sent its last id."""
        return all(request.sent_all for request in self.requests)

    # --- what its trainer has it do

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            # Waited for here: vLLM's own keeps the requests that it had queued, which then are of two versions.
            await self.answered("pause()", self._until_sent())
        # Shielded from where vLLM is asked to, which takes a step: a pause left half way would come late.
        with anyio.CancelScope(shield=True):
            await self._pause(mode)
        await checkpoint_if_cancelled()

    async def _pause(self, mode: PauseMode) -> None:
        while True:
            # The cache is kept: vLLM that is asked to clear it while a session is idle raises, and stays paused.
            await self.answered("pause()", self.llm.pause_generation(mode=mode.value, clear_cache=False))
            if mode is not PauseMode.ABORT or self.sent_all:
                break  # else a request was on its way, and came after what was to cut it
        if mode is not PauseMode.KEEP:
            self.process.stats.clear()  # a scheduler that does not step would go on to count what was ended

    async def resume(self) -> None:
        # Shielded: vLLM that goes on while it is said to stand still would be updated under its requests.
        with anyio.CancelScope(shield=True):
            await self.answered("resume()", self.llm.resume_generation())

    async def check_weights(self, given: Any) -> Any:
        return await self.answered("update_weights()", self.weights.check(given))

    async def load_weights(self, checked: Any, version: str) -> None:
        # By half, vLLM has neither the old weights nor the new ones, and would die of that at its next step.
        with self._ended_by_failure(f"the weights {version!r} could not be loaded"):
            await self.answered("update_weights()", self.weights.load(checked))
            # Stamped by us in any case: a request that is cut before its end has no stamps of vLLM's.
            if self.stamps_itself:
                await self.answered("update_weights()", self.llm.update_weight_version(version))
            await self.reset_prefix_cache()

    async def load_and_compare(self, checked: Any, version: str, *, compares: bool) -> bool | None:
        own = self.own_scores
        if own is None or self.asleep or self.weights_discarded:
            if own is not None:
                own.forget()
            await self.load_weights(checked, version)
            return None
        if self.reload_check:
            self.reload_check = False
            await self._load_own_weights(own)
        compares = compares and await own.take()
        await self.load_weights(checked, version)
        if not compares:
            own.forget()
            return None
        moved = await own.moved()
        if moved is False:
            _log.warning(
                "the weights %r move no score of the engine: they are those that it had, they differ by less than %s "
                "rounds, or they did not arrive. `deltarunner check-weights MODEL` tells which tensors arrive",
                version,
                self.dtype,
            )
        return moved

    async def _load_own_weights(self, own: OwnScores) -> None:
        """Load the engine's own weights once more; end it where that changes its scores."""
        checked = await self.answered("update_weights()", self.weights.check_own())
        if checked is None or not await own.take():
            return
        with self._ended_by_failure("its own weights could not be loaded once more"):
            await self.answered("update_weights()", self.weights.load(checked))
        figures = await own.compare()
        if not figures.holds:
            raise self.ended_by(
                f"its own weights, loaded once more before the first update, change what it computes ({figures}): this "
                "vLLM cannot exchange the weights of this model while it runs. Start an engine from a folder of the "
                "new weights for each update; `deltarunner check-weights MODEL` tells which tensors are wrong"
            )

    async def score_while_paused(self, ids: Sequence[int]) -> dict[int, list[float]]:
        """Score ids while the engine is paused; running turns lose their place in the cache and keep their ids.

        Raises:
            RequestRejected: vLLM refuses to score them.
            EngineDead: it died meanwhile.
        """
        how = replace(Sampling.defaults(), max_tokens=1)
        request = GenerationRequest(name="proof", prompt=ids, sampling=how, scores_prompt=True)
        with self._ended_by_failure("its turns could not be held while ids are scored"):
            await self.reset_prefix_cache()
            await self._call_core(turn_hold.HOLD_TURNS)
            try:
                return {rank: await self._scored(request, rank) for rank in range(max(1, len(self.gate.ranks)))}
            except RequestRejected as error:
                refused = error
            finally:
                await self._call_core(turn_hold.RETURN_TURNS)
        raise refused

    async def _call_core(self, name: str) -> None:
        await self.answered("update_weights()", self.llm.engine_core.call_utility_async(name))

    async def _scored(self, request: GenerationRequest, rank: int) -> list[float]:
        collector = await self.send(request, rank=rank)
        try:
            scores: list[float] = []
            while True:
                output = await self.answered("update_weights()", collector.get())
                if output.prompt_logprobs is not None and output.prompt_logprobs.logprobs:
                    scores = list(output.prompt_logprobs.logprobs)
                if output.finished:
                    return scores
        finally:
            collector.close()

    def ended_by(self, why: str) -> EngineDead:
        if self._death is None:
            self.process.kill()
        return self.death_error(None, why)

    async def reset_prefix_cache(self) -> None:
        # Without the running ones vLLM forgets nothing while anything runs, and answers no more than False.
        reset = self.llm.reset_prefix_cache(reset_running_requests=True)
        if not await self.answered("reset_prefix_cache()", reset):
            raise EngineError("reset_prefix_cache(): vLLM kept its cached prompts")

    def check_sleep(self, level: int) -> None:
        # A GPU's memory can be given up only where vLLM allocated it for that.
        config = self.llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise BadControl(f"sleep({level}): start the engine with VllmEngine(enable_sleep_mode=True).")

    async def sleep(self, level: int) -> None:
        """Give memory up; on a CPU vLLM gives nothing up, and only stands still."""
        # By half, part of its memory may be gone, and nothing says which.
        with self._ended_by_failure("it could not be put to sleep"):
            await self._pause(PauseMode.ABORT)  # also what an earlier pause kept
            await self.answered("sleep()", self.llm.sleep(level))

    async def wake(self, tags: Collection[str]) -> None:
        with self._ended_by_failure("it could not be woken"):
            await self.answered("wake()", self.llm.wake_up(list(tags)))
            # With the last part of its memory vLLM goes on by itself; whether it may is for the trainer to say.
            await self._pause(PauseMode.ABORT)

    async def profile(self, *, on: bool) -> None:
        llm = self.llm
        config = getattr(llm.vllm_config, "profiler_config", None)
        name = f"{'start' if on else 'stop'}_profile()"
        if config is None or config.profiler is None:
            raise BadControl(
                f"{name}: start the engine with VllmEngine(profiler_config="
                '{"profiler": "torch", "torch_profiler_dir": FOLDER}), where its traces go.'
            )
        with anyio.CancelScope(shield=True):
            await self.answered(name, llm.start_profile() if on else llm.stop_profile())

    async def devices(self) -> list[str]:
        """A name for each worker: "cpu", or the UUID by which a driver and NeMo RL know a GPU."""
        names: list[str] = await self.answered("devices()", call_all_workers(self.llm, "device_name"))
        return names

    async def _until_sent(self) -> None:
        while not self.sent_all:
            await self.process.stats.wait_for_step()

    # --- its life

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known without asking."""
        return not self._stopped and self._death is None and not self.llm.errored

    def require_alive(self) -> None:
        if self._stopped:
            raise EngineDead("the engine is not running")
        if not self.is_alive():
            raise self.death_error(None)

    async def answered(self, what: str, call: Awaitable[_Answer]) -> _Answer:
        """What vLLM answers to a call; a dead one would let us wait for ever.

        Raises:
            EngineDead: it died before it answered.
            EngineError: it answered with an error.
        """
        answers: list[_Answer] = []  # a list, since None is an answer too
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
        if failure is None or self.llm.errored:
            raise self.death_error(failure) from failure
        if isinstance(failure, EngineError):
            raise failure
        raise EngineError(f"{what}: {' '.join(str(failure).split())[:500]}") from failure

    async def _until_death(self, scope: anyio.CancelScope) -> None:
        while not self.llm.errored:  # noqa: ASYNC110  # vLLM tells nobody
            await anyio.sleep(_LISTEN_SECONDS)
        scope.cancel()

    @contextmanager
    def _ended_by_failure(self, why: str) -> Iterator[None]:
        """End an engine that could only go on with something broken; every request gets this one error."""
        try:
            yield
        except EngineError as error:
            if self._death is None:
                self.process.kill()
            raise self.death_error(error, f"{why}: {error}") from error

    def death_error(self, error: Exception | None, why: str = "") -> EngineDead:
        """The error for one request of an engine that is dead: the same words and cause for all of them."""
        if self._death is None and self._stopped:
            return EngineDead("the engine was stopped")
        if self._death is None:
            self._death = EngineDead(f"The engine died: {why or self.process.cause_of_death()}")
            self._death.__cause__ = error
            self.gate.fail(lambda: self.death_error(None))
            self.process.stats.clear()
        # A copy for each who is told: one object raised in many tasks would gather the tracebacks of all of them.
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    async def stop(self) -> None:
        """End vLLM and its processes; whoever waits at the gate is sent away."""
        self._stopped = True
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        await self.process.stop()
        self.adapters.close()
        self.llm = None


async def first_version(llm: Any) -> str:
    """The version of the weights that a vLLM began with."""
    version: str = await llm.get_weight_version() if _stamps(llm) else _FIRST_VERSION
    return version


def _stamps(llm: Any) -> bool:
    return hasattr(llm, "update_weight_version")
