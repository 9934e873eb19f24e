"""Control of an engine by its trainer: pause, new weights, adapters, sleep. `BaseEngine` inherits these calls.

This module checks arguments and states and returns results; the runtime changes the engine's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyio.lowlevel import current_token

from runner.concurrency.clocks import PauseState, Progress
from runner.engines.proofs import (
    STEP_PLACES,
    ProofFigures,
    ScoredPass,
    ScoresByPass,
    WeightProof,
    has_ids_in_steps,
)
from runner.engines.runtime import EngineRuntime
from runner.engines.state import SLEEP_TAGS, CheckedUpdate, EngineState, PauseMode, WeightUpdate
from runner.errors import BadControl, BadOption, BadWeights
from runner.options import Sampling

__all__ = ["Controllable", "scores_by_pass"]


class Controllable:
    """Calls by which a trainer controls an engine. Calls that change it run one at a time: a second one waits."""

    runtime: EngineRuntime[Any] | None = None
    """Runtime of the entered engine. It may be None before the engine is entered. It is None for a chat API, and in the
    clients of an engine that several processes share.
    """
    loop: object = None
    """Event loop that entered the engine; the engine works only on this loop. None if it works on every loop."""

    @property
    def state(self) -> EngineState:
        """State of the engine: running, paused, updating or asleep."""
        return self.runtime.state if self.runtime is not None else EngineState.RUNNING

    @property
    def weight_version(self) -> str:
        """Current weight version; "" if it is unknown, as for a chat API."""
        return self.runtime.version if self.runtime is not None else ""

    @property
    def cuts(self) -> int:
        """Number of times that a pause or a sleep cut the turns that were being sampled."""
        return self.runtime.cuts if self.runtime is not None else 0

    @property
    def pause_state(self) -> PauseState:
        """State that stops the clocks of tasks that wait for this engine while the engine is paused."""
        return self.runtime.pause_state if self.runtime is not None else PauseState()

    @property
    def progress(self) -> Progress | None:
        """Clocks of turns that wait for an id. Every engine step restarts all of them.

        None for an engine whose requests can hang one by one, such as requests over a network.
        """
        return self.runtime.progress if self.runtime is not None else None

    @property
    def adapters(self) -> Mapping[str, Path | None]:
        """LoRA adapters that `Sampling(adapter=)` can name, and the folder of each; None if there is no folder."""
        return self.runtime.adapters.folders if self.runtime is not None else {}

    @property
    def is_controlled(self) -> bool:
        """True if a trainer can control the engine: it has a runtime. Some runtimes refuse `update_weights`."""
        return self.runtime is not None

    @property
    def proof_figures(self) -> ProofFigures | None:
        """Figures of the last update's proof; None without a proof, or while the proof waits for `wake`."""
        return self.runtime.proof_figures if self.runtime is not None else None

    def lag(self, version: str) -> int:
        """Return the number of updates since the weights of this version; 0 for an unknown version.

        If the version names an adapter, as "7+poet@2" does, newer versions of the adapter count too.
        """
        return self.runtime.lag(version) if self.runtime is not None else 0

    @contextmanager
    def on_update(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each weight update and each added adapter, while the block runs."""
        runtime = self.runtime
        if runtime is None:
            yield
            return
        runtime.listeners.add(listener)
        try:
            yield
        finally:
            runtime.listeners.discard(listener)

    async def pause(self, mode: PauseMode | str = PauseMode.WAIT) -> None:
        """Pause until `resume`: no new turn begins, and the clocks of waiting episodes stop.

        Args:
            mode: handling of turns that are being sampled: `wait` for their end, `keep` them to continue later, or
                `abort` them; a run then samples them again.

        Raises:
            BadControl: the engine is paused already, or asleep.
            BadOption: the mode is unknown.
        """
        runtime, mode = self._controlled(), PauseMode.of(mode)
        async with runtime.lock:
            runtime.require_running("pause()")
            await runtime.pause_by_caller(mode)

    async def resume(self) -> None:
        """Resume after `pause`.

        Raises:
            BadControl: the engine is not paused, or its weights were discarded.
        """
        runtime = self._controlled()
        async with runtime.lock:
            runtime.require_paused("resume()")
            await runtime.resume_by_caller()

    async def update_weights(
        self,
        given: Any,
        *,
        version: str | None = None,
        mode: PauseMode | str = PauseMode.KEEP,
        proof: WeightProof | None = None,
    ) -> WeightUpdate:
        """Exchange the weights while episodes run; each sampled id records its weight version.

        Weights that do not fit are refused before the engine changes. All cached prompts are dropped. A paused engine
        stays paused.

        Args:
            given: a folder of safetensors, a state dict, a `WeightTransfer` or a `LocalTransfer`; a scripted engine
                takes anything.
            version: name of the new weights; counted by default: "1", "2", ...
            mode: handling of turns that are being sampled; with `keep` a turn can have several versions.
            proof: log-probabilities by the trainer's model. The engine scores the same ids before any turn continues.
                If the scores differ, the engine is ended, so that no id of unknown weights is trained on. If the cache
                is asleep, `wake` scores the proof before the engine resumes.

        Raises:
            BadWeights: the weights or the proof do not fit; the old weights stay.
            BadControl: the weights are asleep, or the engine is quantized and `prove` was not called.
            BadOption: the version is invalid or was used before, or the mode is unknown.
            EngineDead: the exchange failed midway, or the proof does not hold.
            EngineError: too few engines of a fleet received the weights; the message names the lost ones.
        """
        runtime, mode = self._controlled(), PauseMode.of(mode)
        async with runtime.lock:
            return await self._apply(await self._check(given, version, proof), mode)

    async def check_update(
        self, given: Any, *, version: str | None = None, proof: WeightProof | None = None
    ) -> CheckedUpdate:
        """First half of `update_weights`, to update several engines together. The engine does not change yet.

        Args:
            given: as `update_weights` takes it.
            version: name of the new weights.
            proof: as `update_weights` takes it.

        Returns:
            The argument for `apply_update`. Call `apply_update` after the weights were found to fit all engines.

        Raises:
            BadWeights, BadControl, BadOption: as `update_weights`.
        """
        async with self._controlled().lock:
            return await self._check(given, version, proof)

    async def apply_update(self, checked: CheckedUpdate, *, mode: PauseMode | str = PauseMode.KEEP) -> WeightUpdate:
        """Second half of `update_weights`.

        Args:
            checked: the result of `check_update`.
            mode: handling of turns that are being sampled.

        Raises:
            BadControl: the weights were put to sleep after the check, or another update took this version.
            BadOption: the mode is unknown.
            EngineDead: the exchange failed midway, or the proof does not hold.
        """
        async with self._controlled().lock:
            return await self._apply(checked, PauseMode.of(mode))

    async def prove(self, proof: WeightProof, adapter: str | None = None) -> ProofFigures:
        """Compare the engine's current weights with a proof, and return the figures. Turns continue during the call.

        A paused engine scores after `resume`. Call `prove` before the first update, with a proof of the starting
        weights, to measure the difference by rounding alone. Later proofs of the same ids and number types then have
        three times that difference as their tolerance, instead of a value from a table by number type.

        The ids are scored in one pass, as a prompt. If the engine can, it also scores a part of the ids in steps, as
        turns sample them. The returned figures are those of the prompt.

        Args:
            proof: log-probabilities by a model with the expected weights.
            adapter: name of the LoRA adapter of the model. Such a proof does not set the tolerance of later ones.

        Raises:
            BadWeights: the proof does not fit, or does not hold.
            BadControl: the engine cannot score, or it sleeps.
            RequestRejected: the engine has no such adapter.
        """
        runtime = self._controlled()
        if runtime.state is EngineState.ASLEEP:
            raise BadControl("prove(): the engine is asleep and cannot score; call wake() first.")
        await self.check_proof(proof, measures=adapter is None)
        version = runtime.version
        scores = await scores_by_pass(self, proof.ids, adapter)
        async with runtime.lock:
            first, found = len(runtime.versions) == 1, dict[ScoredPass, ProofFigures]()
            for scored, values in scores.items():
                found[scored], why = runtime.proofs.compare(
                    proof, values, runtime.dtype, in_steps=scored.in_steps, measures=first and adapter is None
                )
                if why and adapter is not None:
                    raise BadWeights(f"prove(adapter={adapter!r}): {why}. Give a proof of the model with this adapter.")
                if why:
                    raise BadWeights(f"prove(): {why}. Give a proof of the weights that the engine has.")
            if adapter is None:
                baselines = found if first else None
                runtime.proofs.keep(proof, scores, version, baselines=baselines, ran_beside_turns=True)
        return found[ScoredPass()]

    async def score(self, ids: Sequence[int], *, sampling: Sampling | None = None) -> list[float]:
        """Return the log-probability of each id but the first, in nats.

        Raises:
            BadControl: the engine does not take token ids.
        """
        raise BadControl(f"score(): {type(self).__name__} does not take token ids: use an engine that does.")

    async def check_proof(self, proof: WeightProof, *, measures: bool = False) -> None:
        """Check that the engine can score a proof.

        Args:
            proof: the proof.
            measures: True if the proof measures the difference by rounding, False if it is compared with that
                difference.

        Raises:
            BadWeights: the proof has ids outside of the vocabulary, or too many ids.
            BadControl: the engine cannot score, or it is quantized and the difference by quantization was not measured.
        """
        raise BadControl(
            f"a proof of weights needs an engine of token ids, and {type(self).__name__} takes messages: leave the "
            "proof out."
        )

    async def _check(self, given: Any, version: str | None, proof: WeightProof | None) -> CheckedUpdate:
        runtime = self._controlled()
        runtime.require_alive()
        runtime.require_weights_awake("update_weights()")
        new = runtime.new_version(version)
        if proof is not None:
            await self.check_proof(proof)
        return replace(await runtime.check_update(given, new), proof=proof)

    async def _apply(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        runtime = self._controlled()
        runtime.require_alive()
        runtime.require_weights_awake("update_weights()")
        runtime.require_unused(checked.version)
        return await runtime.apply_update(checked, mode)

    async def add_adapter(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        """Add a LoRA adapter, or a new version of an existing one. An adapter that does not fit changes nothing.

        Turns in flight keep their version; later turns use the new one.

        Args:
            name: name for `Sampling(adapter=name)`.
            given: a folder as PEFT saves it, or its tensors by name; the engine keeps a copy.
            config: content of adapter_config.json; required with tensors.
            number: version number in the label, for an engine that joins a fleet; by default the next number.

        Returns:
            The label of the version, such as "poet@2". It follows the "+" in the weight versions of sampled ids.

        Raises:
            BadWeights: the adapter does not fit; the message names the setting, the tensor or the file.
            BadOption: the name or the number is invalid, or the engine was started without adapters.
            BadControl: the engine cannot be controlled, or sleeps.
        """
        runtime = self._controlled()
        async with runtime.lock:
            runtime.require_weights_awake("add_adapter()")
            label = await runtime.adapters.add(name, given, config=config, number=number)
        runtime.notify_listeners()
        return label

    async def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; turns in flight keep it, and later turns cannot use it.

        Raises:
            BadOption: the engine has no adapter of that name.
            BadControl: the engine cannot be controlled, or sleeps.
        """
        runtime = self._controlled()
        async with runtime.lock:
            runtime.require_weights_awake("remove_adapter()")
            await runtime.adapters.remove(name)

    async def sleep(self, level: int = 1) -> None:
        """Release memory until `wake`; turns that are being sampled are cut, as by `pause("abort")`.

        Args:
            level: 1 moves the weights to CPU memory, 2 discards them.

        Raises:
            BadControl: the engine sleeps already, or cannot sleep.
            BadOption: the level is not 1 or 2.
        """
        if not await self._sleep(level):
            raise BadControl("sleep(): the engine is asleep already; call wake() first.")

    async def _sleep(self, level: int) -> bool:
        """Put the engine to sleep. Return False without a change if the engine sleeps already.

        The state is checked under the lock: NeMo RL may repeat and overlap its calls.
        """
        runtime = self._controlled()
        if level not in (1, 2):
            raise BadOption(f"sleep(level={level!r}): give 1, which keeps the weights, or 2, which discards them.")
        async with runtime.lock:
            if runtime.state is EngineState.ASLEEP:
                return False
            if level == 2 and self.adapters:
                raise BadControl(
                    "sleep(2) would discard the adapters: call remove_adapter(...), and add them after wake()."
                )
            runtime.check_sleep(level)
            await runtime.fall_asleep(level)
        return True

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again, all of it or the named parts. After the last part, the engine resumes.

        It stays paused if it was paused before the sleep. After `sleep(2)`, it stays paused until `update_weights`. A
        proof of weights that were loaded during the sleep is scored before the engine resumes; its figures are in
        `proof_figures`.

        Args:
            tags: "weights", "kv_cache" or both; None for both.

        Raises:
            BadControl: the engine does not sleep.
            BadOption: a tag is unknown.
            EngineDead: the proof does not hold.
        """
        if not await self._wake(tags):
            raise BadControl(f"wake(): the engine is {self.state.value}, not asleep; call sleep() before wake().")

    async def _wake(self, tags: Sequence[str] | None) -> bool:
        """Wake the engine. Return False without a change if the engine is awake."""
        runtime = self._controlled()
        parts = frozenset(SLEEP_TAGS if tags is None else tags)
        if not parts <= set(SLEEP_TAGS) or isinstance(tags, str):
            raise BadOption(f"wake(tags={tags!r}): give a list of {' and '.join(SLEEP_TAGS)}, or nothing for both.")
        async with runtime.lock:
            if runtime.state is not EngineState.ASLEEP:
                return False
            await runtime.wake_up(parts)
        return True

    async def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """Prepare to sample: wake a sleeping engine. NeMo RL's trainers call this before each step.

        Args:
            tags: parts to wake, as for `wake`.
        """
        if self.runtime is not None:
            await self._wake(tags)

    async def finish_generation(self, *, level: int = 1) -> None:
        """Release memory for training: sleep, if the engine is awake. NeMo RL's trainers call this after each step.

        Args:
            level: level of `sleep`; 0 only drops the cached prompts, for an engine on its own devices.
        """
        await (self._reset_prefix_cache() if level == 0 else self._sleep(level))

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prompts. Turns that are being sampled continue, and their prompts are computed again.

        Raises:
            BadControl: the engine is asleep.
        """
        if not await self._reset_prefix_cache():
            raise BadControl("reset_prefix_cache(): the engine is asleep and has no cache; call wake() first.")

    async def _reset_prefix_cache(self) -> bool:
        runtime = self._controlled()
        async with runtime.lock:
            if runtime.state is EngineState.ASLEEP:
                return False
            await runtime.reset_prefix_cache()
        return True

    async def start_profile(self) -> None:
        """Start the profiler that the engine was started with.

        Raises:
            BadControl: the engine has no profiler.
        """
        await self._profile(on=True)

    async def stop_profile(self) -> None:
        """Stop the profiler, which then writes its trace."""
        await self._profile(on=False)

    async def _profile(self, *, on: bool) -> None:
        runtime = self._controlled()
        async with runtime.lock:
            await runtime.profile(on=on)

    async def devices(self) -> list[str]:
        """Return the device of each worker: "cpu", or a GPU's UUID; empty for an engine without a model.

        Raises:
            BadControl: the engine cannot be controlled.
        """
        return await self._controlled().devices()

    def _controlled(self) -> EngineRuntime[Any]:
        if self.runtime is None:
            raise BadControl(
                f"{type(self).__name__} cannot be controlled: enter it first (`async with`). An engine with external "
                "weights cannot be controlled here at all."
            )
        if self.loop is not None and self.loop != current_token():
            raise BadControl(f"{type(self).__name__} belongs to another event loop: control it on that loop.")
        return self.runtime


async def scores_by_pass(engine: Controllable, ids: Sequence[int], adapter: str | None = None) -> ScoresByPass:
    """Score ids as a prompt. If the engine can, also score the ids at `STEP_PLACES` in steps. Turns continue.

    Args:
        engine: an entered engine.
        ids: the sequence, shape [n].
        adapter: name of the LoRA adapter to score with.

    Raises:
        BadControl: the engine cannot score.
        RequestRejected: the engine has no such adapter.
    """
    plain = None if adapter is None else Sampling(adapter=adapter)
    scores = {ScoredPass(): await engine.score(ids, sampling=plain)}
    if engine.runtime is not None and engine.runtime.scores_in_steps and has_ids_in_steps(ids):
        sampling = Sampling(adapter=adapter, temperature=1.0)
        in_steps = await engine.score(ids[: STEP_PLACES.stop], sampling=sampling)
        scores[ScoredPass(in_steps=True)] = in_steps[STEP_PLACES.start - 1 :]
    return scores
