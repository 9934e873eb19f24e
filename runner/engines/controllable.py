"""The calls of an engine for its trainer: pause, new weights, adapters, sleep; `Engine` has them.

Here is what a call takes, refuses and gives back. What it does to the engine's state is done by the runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyio.lowlevel import current_token

from runner.concurrency.clocks import Progress, Standstill
from runner.engines.proofs import ProofFigures, WeightProof
from runner.engines.runtime import EngineRuntime
from runner.engines.state import SLEEP_TAGS, CheckedUpdate, EngineState, PauseMode, WeightUpdate
from runner.errors import BadControl, BadOption, BadWeights

__all__ = ["Controllable"]


class Controllable:
    """An engine as its trainer sees it. Calls come one at a time: a second one waits for the first."""

    runtime: EngineRuntime[Any] | None = None
    """The engine while it runs; None before it was entered, and for an engine whose weights are not ours."""
    loop: object = None
    """The event loop that the engine was entered on, the only one that it can be used on; None where any will do."""

    @property
    def state(self) -> EngineState:
        """What the engine is doing: running, paused, updating or asleep."""
        return self.runtime.state if self.runtime is not None else EngineState.RUNNING

    @property
    def weight_version(self) -> str:
        """The version of the weights that sample now; "" for an engine whose weights are not ours."""
        return self.runtime.version if self.runtime is not None else ""

    @property
    def cuts(self) -> int:
        """How often turns that were being sampled were cut, for a pause or a sleep."""
        return self.runtime.cuts if self.runtime is not None else 0

    @property
    def standstill(self) -> Standstill:
        """Stops the clocks of whoever waits for this engine while it stands still."""
        return self.runtime.standstill if self.runtime is not None else Standstill()

    @property
    def progress(self) -> Progress | None:
        """The clocks of turns that wait for an id, which each step of the engine for any turn restarts.

        None for an engine whose requests may hang each by itself, as those to a server over a network.
        """
        return self.runtime.progress if self.runtime is not None else None

    @property
    def adapters(self) -> Mapping[str, Path | None]:
        """LoRA adapters that `Sampling(adapter=)` can name, and the folder of each; None where tensors were given."""
        return self.runtime.adapters.folders if self.runtime is not None else {}

    @property
    def is_controlled(self) -> bool:
        """Whether the engine runs, or ran, and its weights are ours to exchange."""
        return self.runtime is not None

    @property
    def proof_figures(self) -> ProofFigures | None:
        """The figures of the proof of the weights that sample now; None where none was given with them."""
        return self.runtime.proof_figures if self.runtime is not None else None

    def lag(self, version: str) -> int:
        """How many updates the weights are ahead of this version; 0 for one that the engine never had.

        For ids that an adapter sampled, its later additions count too.
        """
        return self.runtime.lag(version) if self.runtime is not None else 0

    @contextmanager
    def on_update(self, listener: Callable[[], None]) -> Iterator[None]:
        """While the block lasts, call `listener` after each update of the weights and each adapter that was added."""
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
        """Stand still until `resume`: no further turn is begun, every clock of the episodes that wait stops.

        Args:
            mode: what becomes of the turns that are being sampled: `wait` for their end, `keep` them as they are, or
                `abort` them, which a run then samples anew.

        Raises:
            BadControl: the engine is paused already, or asleep.
        """
        runtime, mode = self._controlled(), PauseMode.of(mode)
        async with runtime.lock:
            runtime.require_running("pause()")
            await runtime.pause_by_caller(mode)

    async def resume(self) -> None:
        """Go on after `pause`.

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
        """Exchange the weights under running episodes; every id says which version sampled it.

        Weights that do not fit are refused before the engine is touched. Every cached prompt is forgotten. A paused
        engine stays paused.

        Args:
            given: a folder of safetensors, a state dict, a `WeightTransfer` or a `LocalTransfer`; a scripted engine
                takes anything.
            version: names the new weights; by default they are counted: "1", "2", ...
            mode: what becomes of the turns that are being sampled; with `keep` one turn may be of two versions.
            proof: log-probabilities by the model that the weights are of. The engine scores the same ids before any
                turn goes on; where it computes others, it is ended, so that no id of unknown weights is trained on.

        Raises:
            BadWeights: the weights or the proof do not fit; names the tensor. The old ones stay.
            BadControl: the memory of the weights is asleep, or with a proof that of the cache.
            BadOption: the version was there before.
            EngineDead: the exchange failed half way, or the proof does not hold.
            EngineError: of many engines too few have what a trainer sent; says who was lost.
        """
        runtime, mode = self._controlled(), PauseMode.of(mode)
        async with runtime.lock:
            return await self._apply(await self._check(given, version, proof), mode)

    async def check_update(
        self, given: Any, *, version: str | None = None, proof: WeightProof | None = None
    ) -> CheckedUpdate:
        """The first half of `update_weights`, for who updates several engines: nothing is touched yet.

        Args:
            given: as `update_weights` takes it.
            version: names the new weights.
            proof: as `update_weights` takes it.

        Returns:
            What `apply_update` takes, once all engines have said that the weights fit.

        Raises:
            BadWeights, BadControl, BadOption: as `update_weights`.
        """
        async with self._controlled().lock:
            return await self._check(given, version, proof)

    async def apply_update(self, checked: CheckedUpdate, *, mode: PauseMode | str = PauseMode.KEEP) -> WeightUpdate:
        """The second half of `update_weights`.

        Args:
            checked: what `check_update` gave.
            mode: what becomes of the turns that are being sampled.

        Raises:
            BadControl: the memory of the weights fell asleep in between.
            EngineDead: the exchange failed half way.
        """
        async with self._controlled().lock:
            return await self._apply(checked, PauseMode.of(mode))

    async def prove(self, proof: WeightProof) -> ProofFigures:
        """Compare the weights that the engine has now with a proof; turns go on meanwhile.

        Called before the first update, with a proof of the weights that the engine started with, it measures how far
        both computations are apart by rounding alone: later proofs then have three times that for their tolerance,
        instead of a table by number types.

        Args:
            proof: log-probabilities by a model with the weights that the engine should have.

        Raises:
            BadWeights: the proof does not fit, or does not hold.
            BadControl: the engine cannot score.
        """
        runtime = self._controlled()
        await self.check_proof(proof)
        scores = await self.score(proof.ids)
        async with runtime.lock:
            figures, why = runtime.compare_proof(proof, scores)
            if why:
                raise BadWeights(f"prove(): {why}. Give a proof of the weights that the engine has.")
            runtime.keep_proof(proof, scores, figures)
        return figures

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id but the first; engines that take token ids can."""
        raise BadControl(f"score(): {type(self).__name__} does not take token ids.")

    async def check_proof(self, proof: WeightProof) -> None:
        """Refuse a proof that the engine could not score.

        Raises:
            BadWeights: it has other ids than the model, or too many.
            BadControl: the engine cannot score.
        """
        raise BadControl(f"a proof of weights is scored token by token, and {type(self).__name__} takes messages.")

    async def _check(self, given: Any, version: str | None, proof: WeightProof | None) -> CheckedUpdate:
        runtime = self._controlled()
        runtime.require_weights_awake("update_weights()")
        new = runtime.new_version(version)
        if proof is not None:
            await self.check_proof(proof)
        began = time.monotonic()
        checked = await runtime.check_weights(given)
        return CheckedUpdate(new, time.monotonic() - began, checked, proof)

    async def _apply(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        runtime = self._controlled()
        runtime.require_weights_awake("update_weights()")
        if checked.proof is not None and runtime.asleep:
            raise BadControl("update_weights(proof=): the memory of the cache is asleep: wake() first.")
        began = time.monotonic()
        if runtime.state is EngineState.RUNNING:
            await runtime.hold(mode)
        halted = time.monotonic()
        figures = await runtime.exchange(checked.weights, checked.version, checked.proof)
        seconds = checked.seconds, halted - began, time.monotonic() - halted
        return WeightUpdate(checked.version, *seconds, figures, runtime.moved)

    async def add_adapter(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        """Add a LoRA adapter, or a new version of one that is there; what does not fit changes nothing.

        Turns in flight go on with the version that they began with, later ones are sampled with the new one.

        Args:
            name: what `Sampling(adapter=name)` asks for.
            given: a folder as PEFT saves it, or its tensors by name; copied.
            config: what adapter_config.json would hold; needed where tensors are given.
            number: what its label ends with, for an engine that joins others; by default additions are counted.

        Returns:
            What the weight versions of ids that it samples end with, after a "+": "poet@2".

        Raises:
            BadWeights: the adapter does not fit; names the setting, the tensor or the file.
            BadOption: the name cannot be, or the engine was started without adapters.
            BadControl: the engine cannot be controlled, or sleeps.
        """
        runtime = self._controlled()
        async with runtime.lock:
            runtime.require_weights_awake("add_adapter()")
            label = await runtime.adapters.add(name, given, config=config, number=number)
        runtime.notify_listeners()
        return label

    async def remove_adapter(self, name: str) -> None:
        """Take a LoRA adapter away; turns in flight go on with it, no later one can ask for it.

        Raises:
            BadOption: there is no adapter of that name.
            BadControl: the engine cannot be controlled, or sleeps.
        """
        runtime = self._controlled()
        async with runtime.lock:
            runtime.require_weights_awake("remove_adapter()")
            await runtime.adapters.remove(name)

    async def sleep(self, level: int = 1) -> None:
        """Give memory up until `wake`; turns that are being sampled are cut, as by `pause("abort")`.

        Args:
            level: 1 keeps the weights elsewhere, 2 discards them.

        Raises:
            BadControl: the engine sleeps already, or cannot sleep.
            BadOption: there is no such level.
        """
        if not await self._sleep(level):
            raise BadControl("sleep(): the engine is asleep already.")

    async def _sleep(self, level: int) -> bool:
        """Fall asleep; gives False, and changes nothing, where the engine sleeps.

        The state is looked at under the lock: calls of NeMo RL may be repeated and overlap, and are no mistake.
        """
        runtime = self._controlled()
        if level not in (1, 2):
            raise BadOption(f"sleep(level={level!r}): give 1, which keeps the weights, or 2, which discards them.")
        async with runtime.lock:
            if runtime.state is EngineState.ASLEEP:
                return False
            if level == 2 and self.adapters:
                raise BadControl("sleep(2) would discard the adapters: remove_adapter(...) each, add it when awake.")
            runtime.check_sleep(level)
            await runtime.fall_asleep(level)
        return True

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back, all of it or the parts that are named; with the last part the engine goes on.

        It stays paused where it was paused before it slept, and after `sleep(2)` until `update_weights`.

        Args:
            tags: "weights" and "kv_cache", or one of them; None for both.

        Raises:
            BadControl: the engine does not sleep.
            BadOption: there is no such part.
        """
        if not await self._wake(tags):
            raise BadControl(f"wake(): the engine is {self.state.value}, not asleep.")

    async def _wake(self, tags: Sequence[str] | None) -> bool:
        """Wake up; gives False, and changes nothing, where the engine is awake."""
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
        """Be ready to sample, as NeMo RL's trainers ask before each step: wake, or nothing where it is awake.

        Args:
            tags: what to wake, as for `wake`.
        """
        if self.runtime is not None:
            await self._wake(tags)

    async def finish_generation(self, *, level: int = 1) -> None:
        """Make room for training, as NeMo RL's trainers ask after each step: sleep, or nothing where it sleeps.

        Args:
            level: how deep it sleeps, as for `sleep`; 0 only forgets the cached prompts, for an engine with devices of
                its own.
        """
        await (self._reset_prefix_cache() if level == 0 else self._sleep(level))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt; turns that are being sampled go on, and compute theirs again.

        Raises:
            BadControl: the engine sleeps, and has no cache.
        """
        if not await self._reset_prefix_cache():
            raise BadControl("reset_prefix_cache(): the engine is asleep and has no cache.")

    async def _reset_prefix_cache(self) -> bool:
        runtime = self._controlled()
        async with runtime.lock:
            if runtime.state is EngineState.ASLEEP:
                return False
            await runtime.reset_prefix_cache()
        return True

    async def start_profile(self) -> None:
        """Start the profiler that the engine was started with."""
        await self._profile(on=True)

    async def stop_profile(self) -> None:
        """Stop the profiler, which then writes what it saw."""
        await self._profile(on=False)

    async def _profile(self, *, on: bool) -> None:
        runtime = self._controlled()
        async with runtime.lock:
            await runtime.profile(on=on)

    async def devices(self) -> list[str]:
        """Where the model is, a name for each worker: "cpu", or a GPU's UUID; none for an engine without a model.

        Raises:
            BadControl: the engine cannot be controlled.
        """
        return await self._controlled().devices()

    def _controlled(self) -> EngineRuntime[Any]:
        if self.runtime is None:
            raise BadControl(f"{type(self).__name__} cannot be controlled: its weights are not ours, or it never ran.")
        if self.loop is not None and self.loop != current_token():
            raise BadControl(f"{type(self).__name__} belongs to another event loop: control it where it was entered.")
        return self.runtime
