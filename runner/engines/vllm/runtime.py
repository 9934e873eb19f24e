"""Runtime of a vLLM engine: requests, control by the trainer, and vLLM's death, which ends every wait for vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.concurrency.clocks import FIRST_STEP_FACTOR, Progress
from runner.engines.adapters import AdapterVersion
from runner.engines.base import GenerationRequest
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import STEP_PLACES, ScoredPass, ScoresByPass, has_ids_in_steps
from runner.engines.runtime import ModelRuntime, OpenRequest
from runner.engines.state import NOT_RUNNING, PauseMode
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.own_scores import OwnScores
from runner.engines.vllm.parallel import call_all_workers, stale_tensors
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.weight_loading import VllmWeights, moves_keys
from runner.engines.vllm.worker import turn_hold
from runner.engines.weights import Checkpoint
from runner.errors import BadControl, BadInput, EngineDead, EngineError, RequestRejected, one_line
from runner.logs import logger_for, warn_always
from runner.options import Sampling

__all__ = ["ABORT_SECONDS", "VllmRuntime", "first_version"]

ABORT_SECONDS = 2.0
"""Maximum time to end requests in vLLM, in seconds. A cancellation does not shorten it."""

_FIRST_VERSION = "0"  # for a vLLM that does not report weight versions
_LISTEN_SECONDS = 0.2  # seconds between checks for vLLM's death during a call

_log = logger_for("engines")
_NUMBERS = itertools.count()  # one count for all engines, since several engines may share one vLLM

_Answer = TypeVar("_Answer")


class VllmRequest(OpenRequest, Protocol):
    """Methods of a request's stream that this runtime needs."""

    @property
    def sent_all(self) -> bool: ...


class VllmRuntime(ModelRuntime[VllmRequest]):
    """State of vLLM between its start and its stop. A request is in flight until its stream is closed."""

    adapters: VllmAdapters
    workers = 1
    """Number of workers that share a copy of the model; 1 if their tensors are not compared after an update."""
    _changed: Sequence[Mapping[str, bool] | None] = ()

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
        self.progress = Progress(first=FIRST_STEP_FACTOR)
        process.stats.on_progress = self.progress.note
        self.llm = llm
        """The `AsyncLLM`; None after the stop."""
        self.weights = weights
        self.stamps_itself = _stamps(llm)
        """True if vLLM records weight versions itself, which it does since 0.32."""
        self.own_scores: OwnScores | None = None
        """The engine's scores before and after an update; None for an external vLLM, and if vLLM cannot hold turns."""
        self.reload_check = False
        """True if the engine has to load its own weights again, from files, before its first update or sleep."""
        self._as_vllm = as_vllm
        self._stopped = False
        self._death: EngineDead | None = None

    # --- one request

    async def send(
        self, request: GenerationRequest, adapter: AdapterVersion | None = None, *, rank: int | None = None
    ) -> Any:
        """Send a request to vLLM, and return the collector of its deltas.

        Args:
            request: the request.
            adapter: the adapter version to sample with; None for the model without an adapter.
            rank: the data-parallel rank that computes the request; None to let vLLM choose. vLLM spreads the turns of
                an episode over all ranks, so the cache of the chosen rank may lack the earlier turns.

        Raises:
            RequestRejected: vLLM refuses the request.
            EngineDead: vLLM died, or the engine was stopped.
        """
        # vLLM does not make names unique, and an abort would end all requests of the same name.
        name = f"{request.name}#{next(_NUMBERS)}"
        llm = self.llm
        routing = {"data_parallel_rank": rank} if len(self.gate.ranks) > 1 else {}
        sent = False
        try:
            prompt, parameters = self._as_vllm(request)
            lora = self.adapters.request(adapter)
            # A shield is needed, since a partly sent request could not be aborted.
            with anyio.CancelScope(shield=True):
                collector = await llm.add_request(name, prompt, parameters, lora_request=lora, **routing)
            sent = True
        except Exception as error:  # vLLM refuses with many types of errors
            if llm.errored:
                raise self.death_error(error) from error
            raise RequestRejected(f"{request.name}: {error}") from error
        finally:
            if not sent:
                with anyio.move_on_after(ABORT_SECONDS, shield=True):
                    await llm.abort(name)
        return collector

    async def drop(self, collector: Any) -> None:
        """End a request, finished or not; unread output stays in the collector."""
        # The abort uses vLLM's own id, which is unique, and not the request's name.
        await self.llm.abort(collector.request_id, internal=True)

    @property
    def sent_all(self) -> bool:
        """True if vLLM has sent the last id of every request in flight."""
        return all(request.sent_all for request in self.requests)

    # --- control by the trainer

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            # vLLM's own wait is not used, since it keeps queued requests, which would then have two weight versions.
            await self.answered("pause()", self._until_sent())
        # A shield is needed: vLLM needs a step for a pause, so a cancelled pause could take effect late.
        with anyio.CancelScope(shield=True):
            await self._pause(mode)
        await checkpoint_if_cancelled()

    async def _pause(self, mode: PauseMode) -> None:
        while True:
            # The cache is kept: vLLM fails to clear it while a session is idle, and stays paused.
            await self.answered("pause()", self.llm.pause_generation(mode=mode.value, clear_cache=False))
            if mode is not PauseMode.ABORT or self.sent_all:
                break  # otherwise a request arrived in vLLM after the abort, and the loop aborts again
        if mode is not PauseMode.KEEP:
            self.process.stats.clear()  # a scheduler without steps keeps its old counts

    async def resume(self) -> None:
        # A shield is needed: after a cancellation, vLLM could run although this engine is marked as paused. An update
        # could then happen during requests.
        with anyio.CancelScope(shield=True):
            await self.answered("resume()", self.llm.resume_generation())

    async def check_weights(self, given: Any) -> Any:
        return await self.answered("update_weights()", self.weights.check(given))

    async def load_weights(self, checked: Any, version: str) -> None:
        if not self._changed:  # the first call records the tensors before the update, for the comparison
            await self._note_tensors()
        # After a partial load vLLM has neither the old nor the new weights, and would fail at its next step.
        advice = ". Start the engine again: part of its weights may be the old ones"
        with self._ended_by_failure(f"the weights {version!r} could not be loaded", advice):
            await self.answered("update_weights()", self.weights.load(checked))
            # The streams record versions too, since vLLM returns no versions for a request that is cut.
            if self.stamps_itself:
                await self.answered("update_weights()", self.llm.update_weight_version(version))
            await self.reset_prefix_cache()
        await self._note_tensors()
        if kept := self.stale_workers():
            warn_always(_log, "the weights %r: %s", version, kept.strip())

    async def _note_tensors(self) -> None:
        """Record in `_changed` which tensors changed since the last call, if several workers share a model."""
        if self.workers == 1:
            return
        try:
            self._changed = await self.answered("update_weights()", call_all_workers(self.llm, "changed_tensors"))
        except EngineDead:
            raise
        except EngineError as error:
            _log.warning("updates are not compared between workers: %s", error)
            self.workers, self._changed = 1, []

    def stale_workers(self) -> str:
        kept = stale_tensors([tensors for tensors in self._changed if tensors is not None])
        return "".join(
            f"Worker {number} of {len(self._changed)}, counted from 0, kept its old values of {len(names)} tensors, "
            f"such as {names[0]!r}, but another worker exchanged these tensors: start the engine again, and find out "
            "why this worker did not receive the new values. "
            for number, names in kept.items()
        )

    async def load_and_compare(self, checked: Any, version: str, *, compares: bool) -> bool | None:
        own = self.own_scores
        if own is None or self.asleep or self.weights_discarded:
            if own is not None:
                own.forget()
            await self.load_weights(checked, version)
            return None
        await self._check_reload(own)
        compares = compares and await own.take()
        await self.load_weights(checked, version)
        if not compares:
            own.forget()
            return None
        moved = await own.moved()
        self.score_noise = own.noise or 0.0
        if own.broken:
            where = f"of data-parallel rank {own.broken[0]} " if len(self.gate.ranks) > 1 else ""
            raise self.ended_by(
                f"the engine {where}computes NaN or infinity with the weights {version!r}. Nothing was sampled with "
                "them. `deltarunner check-weights MODEL` lists the tensors that do not arrive"
            )
        if moved is False:
            self.warn_unmoved(version)
        return moved

    async def _check_reload(self, own: OwnScores) -> None:
        """If `reload_check` is set, reset it, load the engine's own weights again, and compare the scores.

        Nothing is loaded if the files of the weights changed or are not usable, or if ids cannot be scored.

        Raises:
            EngineDead: the weights could not be loaded again, or the scores changed. In both cases the engine is ended.
        """
        if not self.reload_check:
            return
        self.reload_check = False
        checked = await self.answered("update_weights()", self.weights.check_own())
        if checked is None:
            warn_always(
                _log,
                "the engine's own weights are not loaded again before the first update, since their files changed: "
                "give each update a proof, or save new weights to another folder",
            )
            return
        if not await own.take():
            return
        with self._ended_by_failure("its own weights could not be loaded again"):
            await self.answered("update_weights()", self.weights.load(checked))
        figures = await own.compare()
        if not figures.holds:
            raise self.ended_by(
                f"a reload of its own weights before the first update changed its scores ({figures}): this "
                "vLLM cannot exchange the weights of this model while it runs. Start an engine from a folder of the "
                "new weights for each update; `deltarunner check-weights MODEL` lists the wrong tensors"
            )

    async def score_while_paused(self, ids: Sequence[int]) -> ScoresByPass:
        """Score ids while the engine is paused; running turns lose their cache and keep their ids.

        Raises:
            RequestRejected: vLLM refuses to score the ids.
            EngineDead: the engine died while it scored the ids.
        """
        ranks = range(max(1, len(self.gate.ranks)))
        steps = ranks if self.scores_in_steps and has_ids_in_steps(ids) else ()
        with self._ended_by_failure("its turns could not be held while ids are scored"):
            await self.reset_prefix_cache()
            await self._call_core(turn_hold.HOLD_TURNS)
            try:
                return {ScoredPass(rank): await self._scored(ids, rank) for rank in ranks} | {
                    ScoredPass(rank, in_steps=True): await self._scored_in_steps(ids, rank) for rank in steps
                }
            except RequestRejected as error:
                refused = error
            finally:
                await self._call_core(turn_hold.RETURN_TURNS)
        raise refused

    async def _call_core(self, name: str) -> None:
        await self.answered("update_weights()", self.llm.engine_core.call_utility_async(name))

    async def _scored(self, ids: Sequence[int], rank: int) -> list[float]:
        """Send the ids as a prompt, and return the log-probability of each id but the first."""
        how = replace(Sampling.defaults(), max_tokens=1)
        request = GenerationRequest(name="proof", prompt=ids, sampling=how, scores_prompt=True)
        collector = await self.send(request, rank=rank)
        try:
            return (await self._read(collector))[0]
        finally:
            collector.close()

    async def _scored_in_steps(self, ids: Sequence[int], rank: int) -> list[float]:
        """Return the log-probabilities of the ids at `STEP_PLACES`, each computed in a decoding step.

        Each scored id has its own request, whose prompt ends two ids before the scored id. The first step samples the
        id in between, and the next step samples the scored id. So all ids are computed in two steps.
        """
        how, collectors = replace(Sampling.defaults(), max_tokens=2, temperature=1.0, ignore_eos=True), list[Any]()
        try:
            for place in STEP_PLACES[: len(ids) - STEP_PLACES.start]:
                given = {"score": list(ids[place - 1 : place + 1])}
                request = GenerationRequest(name="proof", prompt=ids[: place - 1], sampling=how, extra=given)
                collectors.append(await self.send(request, rank=rank))
            return [(await self._read(collector))[1][-1] for collector in collectors]
        finally:
            for collector in collectors:
                collector.close()

    async def _read(self, collector: Any) -> tuple[list[float], list[float]]:
        """Read a request to its end. Return the log-probabilities of its prompt, and of the ids in its last delta.

        A list is empty if vLLM returns no such log-probabilities.
        """
        of_prompt, sampled = list[float](), list[float]()
        while True:
            output = await self.answered("update_weights()", collector.get())
            if output.prompt_logprobs is not None and output.prompt_logprobs.logprobs:
                of_prompt = list(output.prompt_logprobs.logprobs)
            if flat := output.outputs[0].logprobs:
                sampled = list(flat.logprobs)
            if output.finished:
                return of_prompt, sampled

    def ended_by(self, why: str) -> EngineDead:
        if self._death is None:
            self.process.kill()
        return self.death_error(None, why)

    async def reset_prefix_cache(self) -> None:
        # Without the first argument, vLLM drops nothing while a request runs, and returns False. Without the second
        # one, a connector keeps the keys and values that it moved out of vLLM's cache.
        moved = moves_keys(self.llm.vllm_config)
        reset = self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=moved)
        if not await self.answered("reset_prefix_cache()", reset):
            raise EngineError("reset_prefix_cache(): vLLM kept its cached prompts; vLLM's log may have the reason")

    def check_sleep(self, level: int) -> None:
        # vLLM can release only GPU memory that it allocated with its sleep mode enabled.
        config = self.llm.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise BadControl(
                f"sleep({level}): this engine cannot release its memory: start it with "
                "VllmEngine(enable_sleep_mode=True)."
            )

    async def sleep(self, level: int) -> None:
        """Release GPU memory. On a CPU, vLLM is only paused."""
        # After a partial sleep it is unknown which memory is released.
        with self._ended_by_failure("it could not be put to sleep"):
            await self._pause(PauseMode.ABORT)  # this also ends turns that an earlier pause kept
            if self.own_scores is not None and not self.asleep:
                await self._check_reload(self.own_scores)  # ids cannot be scored while the engine sleeps
            await self.answered("sleep()", self.llm.sleep(level))

    async def wake(self, tags: Collection[str]) -> None:
        with self._ended_by_failure("it could not be woken"):
            await self.answered("wake()", self.llm.wake_up(list(tags)))
            # vLLM resumes by itself once all of its memory is awake, but only the trainer may resume it.
            await self._pause(PauseMode.ABORT)

    async def profile(self, *, on: bool) -> None:
        llm = self.llm
        config = getattr(llm.vllm_config, "profiler_config", None)
        name = f"{'start' if on else 'stop'}_profile()"
        if config is None or config.profiler is None:
            raise BadControl(
                f"{name}: this engine has no profiler: start it with VllmEngine(profiler_config="
                '{"profiler": "torch", "torch_profiler_dir": FOLDER}); FOLDER is for its traces.'
            )
        with anyio.CancelScope(shield=True):
            await self.answered(name, llm.start_profile() if on else llm.stop_profile())

    async def checkpoint(self) -> tuple[Checkpoint, Any]:
        """Return the checkpoint with which the engine started, and transformers' configuration of its model.

        Raises:
            BadWeights: the checkpoint is missing.
        """
        return await self.weights.checkpoint(), self.llm.vllm_config.model_config.hf_config

    async def devices(self) -> list[str]:
        """Return the device of each worker: "cpu", or the GPU's UUID as the driver reports it ("GPU-...")."""
        names: list[str] = await self.answered("devices()", call_all_workers(self.llm, "device_name"))
        return names

    async def _until_sent(self) -> None:
        while not self.sent_all:
            await self.process.stats.wait_for_step()

    # --- life cycle

    def is_alive(self) -> bool:
        return not self._stopped and self._death is None and not self.llm.errored

    def require_alive(self) -> None:
        if self._stopped:
            raise EngineDead(NOT_RUNNING)
        if not self.is_alive():
            raise self.death_error(None)

    async def answered(self, what: str, call: Awaitable[_Answer]) -> _Answer:
        """Wait for vLLM's answer to a call, or for its death.

        Raises:
            EngineDead: vLLM died before the answer.
            EngineError: the call failed.
            BadInput: the call found the caller's input invalid.
        """
        answers: list[_Answer] = []  # a list, since the answer may be None
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._until_death, tasks.cancel_scope)
            try:
                answers.append(await call)
            except Exception as error:  # vLLM may raise any exception
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
        raise EngineError(f"{what}: {one_line(failure):.500}") from failure

    async def _until_death(self, scope: anyio.CancelScope) -> None:
        while not self.llm.errored:  # noqa: ASYNC110  # vLLM has no event for its death
            await anyio.sleep(_LISTEN_SECONDS)
        scope.cancel()

    @contextmanager
    def _ended_by_failure(self, why: str, advice: str = "") -> Iterator[None]:
        """End the engine if the block raises an `EngineError`, after which the engine is not usable.

        Raises:
            EngineDead: the block raised such an error. All requests fail with the same message.
        """
        try:
            yield
        except EngineError as error:
            if self._death is None:
                self.process.kill()
            raise self.death_error(error, f"{why}: {str(error).removesuffix('.')}{advice}") from error

    def death_error(self, error: Exception | None, why: str = "") -> EngineDead:
        """Mark the engine as dead, and return the error for one request. All requests get the first cause."""
        if self._death is None and self._stopped:
            return EngineDead("the engine was stopped")
        if self._death is None:
            self._death = EngineDead(f"The engine died: {why or self.process.cause_of_death()}")
            self._death.__cause__ = error
            self.gate.fail(lambda: self.death_error(None))
            self.process.stats.clear()
        # Each request gets a copy, since an object that many tasks raise would collect the tracebacks of all of them.
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    async def stop(self) -> None:
        """End vLLM and its processes. Requests that wait at the gate fail with `EngineDead`."""
        self._stopped = True
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        await self.process.stop()
        self.adapters.close()
        self.llm = None


async def first_version(llm: Any) -> str:
    """Return the version of the weights with which an `AsyncLLM` started; "0" if this vLLM has no versions."""
    version: str = await llm.get_weight_version() if _stamps(llm) else _FIRST_VERSION
    return version


def _stamps(llm: Any) -> bool:
    return hasattr(llm, "update_weight_version")
