"""An engine while it runs: the requests inside, its state for its trainer, and what each kind of engine does itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import anyio

from runner.concurrency.cancellation import to_its_end
from runner.concurrency.clocks import Progress, Standstill
from runner.engines.adapters import Adapters, base_and_adapter
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import Accepted, ProofFigures, WeightProof, compare_scores, failure_reason, tolerance_of
from runner.engines.state import SLEEP_TAGS, EngineState, PauseMode
from runner.errors import BadControl, BadOption, EngineError, RequestRejected

__all__ = ["EngineRuntime", "OpenRequest"]

UNDO_SECONDS = 10.0
"""The seconds that undoing a failed pause may take: nothing can cancel it."""


class OpenRequest(Protocol):
    """What the runtime asks of the stream of a request."""

    def stamp(self, version: str) -> None: ...


RequestT = TypeVar("RequestT", bound=OpenRequest)


class EngineRuntime(ABC, Generic[RequestT]):
    """What an engine and its streams share while it runs; an engine that is entered again has another one.

    The state is kept here for every kind of engine, and nobody else changes it; `Controllable` has the calls that ask
    for a change. A subclass does what only its kind can: it pauses, loads weights, gives memory up. All of it is called
    one at a time, by who holds `lock`.
    """

    def __init__(self, gate: AdmissionGate, adapters: Adapters, *, context: int, version: str) -> None:
        self.gate = gate
        """The gate of the engine, which lets nobody in while the engine does not run."""
        self.adapters = adapters
        """The LoRA adapters on the weights."""
        self.context = context
        """The most ids a prompt and what is sampled on it may have together."""
        self.versions = [version]
        """Every weight version so far, the newest last."""
        self.requests: dict[RequestT, None] = {}
        """The requests inside; ordered, so that what befalls all of them comes in one order."""
        self.sampled = 0
        """Ids that left the engine."""
        self.state = EngineState.RUNNING
        """What the engine is doing."""
        self.standstill = Standstill()
        """Stops the clocks of whoever waits for the engine while it stands still."""
        self.progress: Progress | None = Progress()
        """The clocks of turns that wait for an id, which each step of the engine for any turn restarts; None for an
        engine whose requests may hang each by itself."""
        self.asleep: frozenset[str] = frozenset()
        """The parts of the engine's memory that are given up."""
        self.weights_discarded = False
        """Whether a sleep discarded the weights, and none were given since."""
        self.paused_by_caller = False
        """Whether the trainer paused the engine, which then goes on only when the trainer resumes it."""
        self.cuts = 0
        """How often turns that were being sampled were cut."""
        self.listeners: set[Callable[[], None]] = set()
        """Called after each update of the weights and each adapter that was added."""
        self.lock = anyio.Lock()
        """Held by who changes the engine: a second one waits for the first."""
        self.proof_figures: ProofFigures | None = None
        """The figures of the proof of the weights that sample now; None where none was given."""
        self.moved: bool | None = None
        """False where the last update moved no score of the engine's; None where that was not compared."""
        self.dtype = "float32"
        """The number type that the engine computes in, by torch's name."""
        self._ages = {version: 0}
        self._baseline: ProofFigures | None = None
        self._accepted: Accepted | None = None

    # --- requests

    @abstractmethod
    def require_alive(self) -> None:
        """Return if requests can be answered, as far as is known without asking.

        Raises:
            EngineDead: they cannot, with the cause.
        """

    def close(self, request: RequestT) -> None:
        """Take note that a request is not inside any more; twice is allowed."""
        self.requests.pop(request, None)

    # --- versions

    @property
    def version(self) -> str:
        """The version of the weights that sample now."""
        return self.versions[-1]

    def lag(self, version: str) -> int:
        """How many updates ago the weights had this version; 0 for one that the engine never had.

        For ids that an adapter sampled, its later additions count too.
        """
        newest = len(self.versions) - 1
        behind = newest - self._ages.get(base_and_adapter(version)[0], newest)
        return behind + self.adapters.lag(version)

    def new_version(self, version: str | None) -> str:
        """The name of the next weights: the one that is given, or the next number.

        Raises:
            BadOption: it is no name, or was there before.
        """
        if version is None:
            return next(name for name in map(str, count(len(self.versions))) if name not in self._ages)
        if not isinstance(version, str) or not version:
            raise BadOption(f"update_weights(version={version!r}): give a name, or nothing to count up.")
        if base_and_adapter(version)[1]:
            raise BadOption(f"update_weights(version={version!r}): what follows the + would stand for an adapter.")
        if version in self._ages:
            raise BadOption(f"update_weights(version={version!r}): these weights were there before; give a new name.")
        return version

    def _add_version(self, version: str) -> None:
        """Take note of weights that are loaded: what is sampled from now on is of this version."""
        for request in self.requests:
            request.stamp(version)
        self._ages[version] = len(self.versions)
        self.versions.append(version)
        self.weights_discarded = False

    def note_version(self, version: str) -> None:
        """Take note of the version that ids came with: whoever owns the weights may have exchanged them."""
        if version not in self._ages:
            self._add_version(version)
            self.notify_listeners()

    def notify_listeners(self) -> None:
        """Call the listeners."""
        for listener in list(self.listeners):
            listener()

    # --- from state to state

    async def hold(self, mode: PauseMode) -> None:
        """From running to paused; undone where it fails or is cancelled."""
        # The gate first, so that nobody enters who would then be cut or be waited for.
        self.gate.hold()
        self.cuts += mode is PauseMode.ABORT
        try:
            if mode is not PauseMode.WAIT:  # else what is being sampled goes on, and so do its clocks
                self.standstill.begin()
            await self.pause(mode)
        except BaseException:
            self.state = EngineState.PAUSED  # until it goes on: `resume` may be asked again where this fails
            await to_its_end(self._undo)
            raise
        self.standstill.begin()
        self.state = EngineState.PAUSED

    async def _undo(self) -> None:
        # Bounded, since an engine that did not pause may not answer to this either.
        with anyio.move_on_after(UNDO_SECONDS):
            await self.release()

    async def release(self) -> None:
        """From paused to running."""
        await self.resume()
        self.state = EngineState.RUNNING
        self.standstill.end()
        self.gate.release()

    async def pause_by_caller(self, mode: PauseMode) -> None:
        """From running to paused, until the trainer resumes it."""
        await self.hold(mode)
        self.paused_by_caller = True

    async def resume_by_caller(self) -> None:
        """From paused to running, since the trainer says so."""
        self.paused_by_caller = False
        await to_its_end(self.release)

    async def exchange(self, checked: Any, version: str, proof: WeightProof | None = None) -> ProofFigures | None:
        """Through updating to what the engine was, or to running if it stood still for the new weights alone.

        Returns:
            The figures of the proof; None without one.

        Raises:
            EngineDead: the weights could not be loaded, or their proof does not hold.
        """
        figures: list[ProofFigures] = []
        # To its end: weights that were exchanged by half could neither be used nor be put back.
        await to_its_end(partial(self._exchange, checked, version, proof, figures))
        return figures[0] if figures else None

    async def _exchange(
        self, checked: Any, version: str, proof: WeightProof | None, figures: list[ProofFigures]
    ) -> None:
        before, self.state = self.state, EngineState.UPDATING
        try:
            self.moved = await self.load_and_compare(checked, version, compares=proof is None)
            if proof is not None:
                figures.append(await self._prove(proof, version))
            self.proof_figures = figures[0] if figures else None
            self._add_version(version)
        finally:
            self.state = before
        await self._release_unless_paused()
        self.notify_listeners()

    async def _prove(self, proof: WeightProof, version: str) -> ProofFigures:
        """Score a proof's ids on every rank while no turn goes on; where one computes others, end the engine."""
        worst: ProofFigures | None = None
        try:
            by_rank = await self.score_while_paused(proof.ids)
        except RequestRejected as error:
            raise self.ended_by(f"the proof of the weights {version!r} could not be scored: {error}") from error
        for rank, scores in by_rank.items():
            figures, why = self.compare_proof(proof, scores)
            if why:
                where = f" of its data-parallel rank {rank}" if len(by_rank) > 1 else ""
                raise self.ended_by(
                    f"the proof of the weights {version!r}{where} does not hold: {why}. Nothing was sampled with them. "
                    "`deltarunner check-weights MODEL` tells which tensors do not arrive"
                )
            worst = figures if worst is None or figures.median > worst.median else worst
        assert worst is not None, "an engine has a rank"
        self.keep_proof(proof, next(iter(by_rank.values())), None)
        return worst

    def compare_proof(self, proof: WeightProof, scores: Sequence[float]) -> tuple[ProofFigures, str]:
        """Compare an engine's scores with a proof: the figures, and why it does not hold, empty where it does."""
        tolerance = tolerance_of(proof, self.dtype, self._baseline)
        figures = compare_scores(proof, scores, tolerance, self._accepted, engine_dtype=self.dtype)
        return figures, failure_reason(figures, proof, scores, self._accepted)

    def keep_proof(self, proof: WeightProof, scores: Sequence[float], baseline: ProofFigures | None) -> None:
        """Keep a proof that held, for the next one to be compared with.

        Args:
            proof: the proof.
            scores: the engine's log-probabilities of the same ids.
            baseline: its figures where they are of the weights that the engine started with.
        """
        self._accepted = Accepted(proof, scores)
        if baseline is not None and len(self.versions) == 1:
            self._baseline = baseline

    async def fall_asleep(self, level: int) -> None:
        """From running or paused to asleep; what was being sampled is cut."""
        if self.state is EngineState.RUNNING:
            await self.hold(PauseMode.ABORT)
        # To its end: memory given up by half could not be taken back.
        await to_its_end(partial(self._fall_asleep, level))

    async def _fall_asleep(self, level: int) -> None:
        self.cuts += 1  # also of turns that an earlier pause kept
        await self.sleep(level)
        self.asleep = frozenset(SLEEP_TAGS)
        self.weights_discarded = self.weights_discarded or level == 2
        self.state = EngineState.ASLEEP

    async def wake_up(self, parts: frozenset[str]) -> None:
        """From asleep to what the engine was before, once the last part of its memory is there."""
        await to_its_end(partial(self._wake_up, parts))

    async def _wake_up(self, parts: frozenset[str]) -> None:
        await self.wake(sorted(parts & self.asleep))
        self.asleep -= parts
        if not self.asleep:
            self.state = EngineState.PAUSED
            await self._release_unless_paused()

    async def _release_unless_paused(self) -> None:
        """Go on, unless the trainer paused the engine or some of what it needs is missing."""
        if not self.paused_by_caller and not self.weights_discarded and not self.asleep:
            await self.release()

    # --- what cannot be now, each refused by the name of the call

    def require_running(self, call: str) -> None:
        """Return if the engine is running."""
        if self.state is not EngineState.RUNNING:
            raise BadControl(f"{call}: the engine is {self.state.value} already.{self._recovery_hint()}")

    def require_paused(self, call: str) -> None:
        """Return if the engine is paused and has weights to go on with."""
        if self.state is not EngineState.PAUSED:
            raise BadControl(f"{call}: the engine is {self.state.value}, not paused.{self._recovery_hint()}")
        if self.weights_discarded:
            raise BadControl(f"{call}: sleep(2) discarded the weights: update_weights(...) first.")

    def require_weights_awake(self, call: str) -> None:
        """Return if the memory of the weights is not given up."""
        if "weights" in self.asleep:
            raise BadControl(f"{call}: the memory of the weights is asleep: wake(['weights']) first.")

    def _recovery_hint(self) -> str:
        ways = {EngineState.PAUSED: " resume() ends that.", EngineState.ASLEEP: " wake() ends that."}
        return ways.get(self.state, "")

    # --- what each kind of engine does itself; new weights, a sleep or a wake that fails half way raises EngineDead

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stand still; what was being sampled is ended or kept, by `mode`."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on; also after a `pause` that failed or was cancelled half way."""

    @abstractmethod
    async def check_weights(self, given: Any) -> Any:
        """Compare new weights with the model while the engine goes on; gives what `load_weights` needs of them.

        Raises:
            BadWeights: they do not fit; names the tensor.
        """

    @abstractmethod
    async def load_weights(self, checked: Any, version: str) -> None:
        """Exchange the weights, and forget every cached prompt."""

    async def load_and_compare(self, checked: Any, version: str, *, compares: bool) -> bool | None:
        """Exchange the weights, and compare the engine's own scores before and after where it can.

        Args:
            checked: the result of `check_weights`.
            version: names the new weights.
            compares: False where a proof shows more.

        Returns:
            False where no score moved, None where they were not compared.
        """
        await self.load_weights(checked, version)
        return None

    async def score_while_paused(self, ids: Sequence[int]) -> dict[int, list[float]]:
        """The log-probability of each id but the first, by data-parallel rank, while no turn goes on.

        Raises:
            BadControl: the engine cannot score.
        """
        raise BadControl("update_weights(proof=): this engine cannot score ids.")

    def ended_by(self, why: str) -> EngineError:
        """End the engine for a reason, and return the error that every request gets."""
        # Not abstract: an engine that cannot score is never given a proof, and has nothing to implement here.
        raise NotImplementedError(f"{type(self).__name__} scores ids and has to say how it ends")

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt, those of running requests included."""

    def check_sleep(self, level: int) -> None:  # one that can always sleep has nothing to say
        """Look whether `sleep` is possible, before anything is touched.

        Raises:
            BadControl: it is not; says why.
        """

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Give memory up: 1 keeps the weights elsewhere, 2 discards them."""

    @abstractmethod
    async def wake(self, tags: Collection[str]) -> None:
        """Take the memory of these parts back, and stand still."""

    @abstractmethod
    async def profile(self, *, on: bool) -> None:
        """Start or stop the profiler.

        Raises:
            BadControl: the engine has none, or was started without; says how to start it.
        """

    async def devices(self) -> list[str]:
        """Where the model is, a name for each worker."""
        return []
