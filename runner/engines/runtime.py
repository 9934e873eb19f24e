"""Runtime of an engine: its requests, its state for the trainer, and the operations of each kind of engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import anyio

from runner.concurrency.cancellation import to_its_end
from runner.concurrency.clocks import PauseState, Progress
from runner.engines.adapters import Adapters, base_and_adapter
from runner.engines.gate import AdmissionGate
from runner.engines.proof_history import ProofHistory
from runner.engines.proofs import Accepted, ProofFigures, ScoredPass, ScoresByPass, WeightProof, has_moved
from runner.engines.state import SLEEP_TAGS, CheckedUpdate, EngineState, PauseMode, WeightUpdate
from runner.errors import BadControl, BadOption, EngineError, RequestRejected
from runner.logs import logger_for, warn_always

__all__ = ["EngineRuntime", "ModelRuntime", "OpenRequest"]

UNDO_SECONDS = 10.0
"""Time limit for undoing a failed pause, in seconds. A cancellation does not interrupt the undoing."""


_log = logger_for("engines")


class OpenRequest(Protocol):
    """Methods of a request's stream that the runtime needs."""

    def stamp(self, version: str) -> None: ...


RequestT = TypeVar("RequestT", bound=OpenRequest)


class EngineRuntime(ABC, Generic[RequestT]):
    """State that an engine and its streams share while the engine runs. Each entry of the engine creates a new runtime.

    Only this class changes the state, on request of `Controllable`. A subclass implements the operations of its kind:
    pause, update weights, release memory. These operations run one at a time, under `lock`.
    """

    scores_in_steps = False
    """True if the engine can score given ids in steps, as turns sample them."""

    def __init__(self, gate: AdmissionGate, adapters: Adapters, *, context: int, version: str) -> None:
        self.gate = gate
        """Gate of the engine; closed while the engine is paused."""
        self.adapters = adapters
        """LoRA adapters of the engine."""
        self.context = context
        """Maximum number of ids of prompt and turn together."""
        self.versions = [version]
        """All weight versions so far, the newest last."""
        self.requests: dict[RequestT, None] = {}
        """Requests in the engine, in order of entry, so that operations on all requests have a fixed order."""
        self.sampled = 0
        """Number of sampled ids that left the engine."""
        self.state = EngineState.RUNNING
        """State of the engine."""
        self.pause_state = PauseState()
        """State that stops the clocks of tasks that wait for the engine while the engine is paused."""
        self.progress: Progress | None = Progress()
        """Clocks of turns that wait for an id. Every engine step restarts all of them. None for an engine whose
        requests can hang one by one.
        """
        self.asleep: frozenset[str] = frozenset()
        """Released parts of the engine's memory."""
        self.weights_discarded = False
        """True if a sleep discarded the weights and no new weights were loaded since."""
        self.paused_by_caller = False
        """True if the trainer paused the engine. Only the trainer can resume it then."""
        self.cuts = 0
        """Number of times that turns were cut."""
        self.listeners: set[Callable[[], None]] = set()
        """Functions that are called after each weight update and each added adapter."""
        self.lock = anyio.Lock()
        """Lock for changes of the engine. A second change waits for the first."""
        self.proof_figures: ProofFigures | None = None
        """Figures of the last update's proof; None without a proof, or while the proof waits for `wake`."""
        self.moved: bool | None = None
        """True if the last update changed scores in every compared pass, otherwise False; None without a comparison."""
        self.dtype = "float32"
        """Number type of the engine's computation, by torch's name."""
        self._ages = {version: 0}
        self.proofs = ProofHistory()
        """Proofs of the weights so far."""
        self._waiting_proof: Callable[[], Awaitable[ProofFigures]] | None = None

    # --- requests

    @abstractmethod
    def require_alive(self) -> None:
        """Check that requests can be answered, as far as is known without a request.

        Raises:
            EngineDead: requests cannot be answered; the message has the cause.
        """

    def close(self, request: RequestT) -> None:
        """Remove a request that left the engine; idempotent."""
        self.requests.pop(request, None)

    # --- versions

    @property
    def version(self) -> str:
        """Current weight version."""
        return self.versions[-1]

    def lag(self, version: str) -> int:
        """Return the number of updates since this version; 0 for an unknown version.

        If the version names an adapter, as "7+poet@2" does, newer versions of the adapter count too.
        """
        newest = len(self.versions) - 1
        missed = newest - self._ages.get(base_and_adapter(version)[0], newest)
        return missed + self.adapters.lag(version)

    def new_version(self, version: str | None) -> str:
        """Return the name of the next weights: the given one, or the next number.

        Raises:
            BadOption: the name is invalid, or was used before.
        """
        if version is None:
            return next(name for name in map(str, count(len(self.versions))) if name not in self._ages)
        if not isinstance(version, str) or not version:
            raise BadOption(f"update_weights(version={version!r}): give a name, or None for the next number.")
        if base_and_adapter(version)[1]:
            raise BadOption(
                f"update_weights(version={version!r}): + separates the version from an adapter's name: leave it out."
            )
        if version in self._ages:
            raise BadOption(f"update_weights(version={version!r}): this version was used before; give a new name.")
        return version

    def require_unused(self, version: str) -> None:
        """Raise BadControl if this name was used for an earlier weight version, even for the same weights."""
        if version in self._ages:
            raise BadControl(
                f"apply_update(): the engine got weights of the version {version!r} since the check: apply each "
                "check_update() once, and before the next one, or give each check its own version."
            )

    def _add_version(self, version: str) -> None:
        """Record a new weight version. Ids that are sampled from now on have this version."""
        for request in self.requests:
            request.stamp(version)
        self._ages[version] = len(self.versions)
        self.versions.append(version)
        self.weights_discarded = False

    def note_version(self, version: str) -> None:
        """Record the weight version of sampled ids. It is a new one if the owner of the weights exchanged them."""
        if version not in self._ages:
            self._add_version(version)
            self.notify_listeners()

    def notify_listeners(self) -> None:
        """Call the listeners."""
        for listener in list(self.listeners):
            listener()

    # --- changes of the state

    async def hold(self, mode: PauseMode) -> None:
        """Change from running to paused. A failure or a cancellation undoes the change."""
        # The gate is closed first. Otherwise further requests could enter, and would be cut or waited for.
        self.gate.hold()
        self.cuts += mode is PauseMode.ABORT
        try:
            if mode is not PauseMode.WAIT:  # with WAIT, turns and their clocks continue
                self.pause_state.begin()
            await self.pause(mode)
        except BaseException:
            # The state is set before the engine resumes, since `resume` may be called again after a failure.
            self.state = EngineState.PAUSED
            await to_its_end(self._undo)
            raise
        self.pause_state.begin()
        self.state = EngineState.PAUSED

    async def _undo(self) -> None:
        # This has a time limit, since an engine that failed to pause may hang here too.
        with anyio.move_on_after(UNDO_SECONDS):
            await self.release()

    async def release(self) -> None:
        """Change from paused to running."""
        await self.resume()
        self.state = EngineState.RUNNING
        self.pause_state.end()
        self.gate.release()

    async def pause_by_caller(self, mode: PauseMode) -> None:
        """Change from running to paused, until the trainer resumes."""
        await self.hold(mode)
        self.paused_by_caller = True

    async def resume_by_caller(self) -> None:
        """Change from paused to running for the trainer."""
        self.paused_by_caller = False
        await to_its_end(self.release)

    async def fall_asleep(self, level: int) -> None:
        """Change from running or paused to asleep; turns that are being sampled are cut."""
        if self.state is EngineState.RUNNING:
            await self.hold(PauseMode.ABORT)
        # A shield is needed, since partly released memory could not be allocated again.
        await to_its_end(partial(self._fall_asleep, level))

    async def _fall_asleep(self, level: int) -> None:
        self.cuts += 1  # the sleep also cuts turns that an earlier pause kept
        await self.sleep(level)
        self.asleep = frozenset(SLEEP_TAGS)
        self.weights_discarded = self.weights_discarded or level == 2
        self.state = EngineState.ASLEEP

    async def wake_up(self, parts: frozenset[str]) -> None:
        """Allocate parts of memory again. After the last, resume unless the trainer paused or weights are discarded."""
        await to_its_end(partial(self._wake_up, parts))

    async def _wake_up(self, parts: frozenset[str]) -> None:
        await self.wake(sorted(parts & self.asleep))
        self.asleep -= parts
        if self.asleep:
            return
        self.state = EngineState.PAUSED
        if self._waiting_proof is not None:
            prove, self._waiting_proof = self._waiting_proof, None
            self.proof_figures = await prove()
            self.notify_listeners()
        await self._release_unless_paused()

    async def _release_unless_paused(self) -> None:
        """Resume, unless the trainer paused the engine, or its weights are discarded, or memory is still released."""
        if not self.paused_by_caller and not self.weights_discarded and not self.asleep:
            await self.release()

    # --- checks of the state; errors begin with the name of the call

    def require_running(self, call: str) -> None:
        """Raise BadControl if the engine is paused, updating or asleep."""
        if self.state is not EngineState.RUNNING:
            raise BadControl(f"{call}: the engine is {self.state.value}, not running.{self._recovery_hint()}")

    def require_paused(self, call: str) -> None:
        """Raise BadControl if the engine is not paused, or if its weights were discarded."""
        if self.state is not EngineState.PAUSED:
            raise BadControl(f"{call}: the engine is {self.state.value}, not paused.{self._recovery_hint()}")
        if self.weights_discarded:
            raise BadControl(f"{call}: sleep(2) discarded the weights; call update_weights(...) first.")

    def require_weights_awake(self, call: str) -> None:
        """Raise BadControl if the memory of the weights is released."""
        if "weights" in self.asleep:
            raise BadControl(f"{call}: the memory of the weights is asleep; call wake(['weights']) first.")

    def _recovery_hint(self) -> str:
        ways = {EngineState.PAUSED: " resume() ends that.", EngineState.ASLEEP: " wake() ends that."}
        return ways.get(self.state, "")

    # --- operations of each kind of engine; a load, sleep or wake that fails midway raises EngineDead

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine. `mode` selects whether turns that are being sampled are waited for, kept or cut."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume the engine, even after a `pause` that failed or was cancelled midway."""

    @abstractmethod
    async def check_update(self, given: Any, version: str) -> CheckedUpdate:
        """Compare new weights with the model while the engine runs.

        Raises:
            BadWeights: the weights do not fit; the message names the tensor.
        """

    @abstractmethod
    async def apply_update(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Replace the weights with checked ones. A running engine pauses for this.

        Raises:
            EngineDead: the exchange failed midway, or the proof of the weights does not hold.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Drop all cached prompts, also prompts of running requests."""

    def check_sleep(self, level: int) -> None:  # default: sleep is always possible
        """Check that `sleep` is possible, before anything changes.

        Raises:
            BadControl: `sleep` is not possible; the message has the reason.
        """

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Release memory: level 1 moves the weights to CPU memory, level 2 discards them."""

    @abstractmethod
    async def wake(self, tags: Collection[str]) -> None:
        """Allocate the memory of the parts in `tags` again; the engine stays paused."""

    @abstractmethod
    async def profile(self, *, on: bool) -> None:
        """Start or stop the profiler.

        Raises:
            BadControl: the engine has no profiler, or was started without it.
        """

    async def devices(self) -> list[str]:
        """Return the device of each worker; empty for an engine without workers."""
        return []


class ModelRuntime(EngineRuntime[RequestT]):
    """Runtime of an engine with one model (a fleet has several). A subclass loads new weights, or refuses them."""

    score_noise = 0.0
    """Largest difference between two passes over the same ids with the same weights, in nats."""

    @property
    def open_requests(self) -> int:
        """Number of requests that the engine still samples."""
        return len(self.requests)

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether requests can be answered, as far as is known without a request."""

    async def check_update(self, given: Any, version: str) -> CheckedUpdate:
        began = time.monotonic()
        checked = await self.check_weights(given)
        return CheckedUpdate(version, time.monotonic() - began, checked)

    async def apply_update(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        began = time.monotonic()
        if self.state is EngineState.RUNNING:
            await self.hold(mode)
        halted = time.monotonic()
        figures = await self.exchange(checked.weights, checked.version, checked.proof)
        seconds = checked.seconds, halted - began, time.monotonic() - halted
        return WeightUpdate(checked.version, *seconds, figures, self.moved)

    async def exchange(self, checked: Any, version: str, proof: WeightProof | None = None) -> ProofFigures | None:
        """Load new weights and return to the earlier state. The engine resumes if it was paused only for this.

        Returns:
            The figures of the proof; None without a proof, or if the cache is asleep: `wake` then scores the proof.

        Raises:
            EngineDead: the weights could not be loaded, or their proof does not hold.
        """
        # A shield is needed, since partly exchanged weights can be neither used nor restored.
        await to_its_end(partial(self._exchange, checked, version, proof))
        return self.proof_figures

    async def _exchange(self, checked: Any, version: str, proof: WeightProof | None) -> None:
        before, self.state, figures = self.state, EngineState.UPDATING, None
        last, self._waiting_proof = self.proofs.last, None
        if proof is None or last is None or not last.is_of(proof, self.version):
            last = None
        try:
            # The scores of the last proof show at no cost whether the weights changed. Without such scores, the engine
            # scores a few ids in one pass, or in three passes at the first update.
            self.moved = await self.load_and_compare(checked, version, compares=last is None or last.by_pass is None)
            if proof is not None and self.asleep:  # without a cache, scoring and sampling are impossible
                self._waiting_proof = partial(self._prove, proof, version, last)
            elif proof is not None:
                figures = await self._prove(proof, version, last)
            self.proof_figures = figures
            self._add_version(version)
        finally:
            self.state = before
        await self._release_unless_paused()
        if self._waiting_proof is None:  # with a waiting proof, listeners are notified later, with its figures
            self.notify_listeners()

    async def _prove(self, proof: WeightProof, version: str, last: Accepted | None) -> ProofFigures:
        """Score a proof's ids on every rank while no turn runs; return the figures of the rank with the largest median.

        Args:
            proof: the proof.
            version: name of the new weights.
            last: proof of the previous weights, if it has the same ids; otherwise None.

        Raises:
            EngineError: the proof does not hold, or could not be scored; the engine has ended.
        """
        of_prompts = list[ProofFigures]()
        try:
            by_pass = await self.score_while_paused(proof.ids)
        except RequestRejected as error:
            raise self.ended_by(f"the proof of the weights {version!r} could not be scored: {error}") from error
        for scored, scores in by_pass.items():  # the passes over whole prompts come first
            figures, why = self.proofs.compare(proof, scores, self.dtype, in_steps=scored.in_steps)
            if why:
                where = f" of its data-parallel rank {scored.rank}" if len(self.gate.ranks) > 1 else ""
                raise self.ended_by(
                    f"the proof of the weights {version!r}{where} does not hold: {why}. {self.stale_workers()}"
                    "No id was sampled with these weights. Either tensors did not arrive (`deltarunner check-weights "
                    "MODEL` lists them), or the proof is of other weights, or of a model in another number type "
                    "(`WeightProof(dtype=)`)"
                )
            if not scored.in_steps:
                of_prompts.append(figures)
        self.proofs.keep(proof, by_pass, version)
        if last is not None and self.moved is None:
            self._compare_with_last(proof, version, by_pass, last)
        return max(of_prompts, key=lambda each: each.median)

    def stale_workers(self) -> str:
        """Return a sentence about workers that kept old values in the last update; "" without such workers."""
        return ""

    def _compare_with_last(self, proof: WeightProof, version: str, now: ScoresByPass, last: Accepted) -> None:
        """Set `moved` from the scores of two proofs of the same ids.

        Equal scores do not end the engine, since the change may be smaller than its rounding.
        """
        before = last.by_pass or {ScoredPass(): last.scores}
        if last.by_pass is None:
            now = {each: scores for each, scores in now.items() if not each.in_steps}
        if before.keys() != now.keys():
            return
        self.moved = has_moved(before, now, self.score_noise)
        wanted, given = ({ScoredPass(): each.logprobs} for each in (last.proof, proof))
        if not self.moved and has_moved(wanted, given, 0.0):
            self.warn_unmoved(version)

    def warn_unmoved(self, version: str) -> None:
        """Log a warning that an update changed no score."""
        ranks = " or of one of its data-parallel ranks" if len(self.gate.ranks) > 1 else ""
        warn_always(
            _log,
            "the weights %r change no score of the engine%s: they equal the old ones, they differ by less than "
            "the rounding of %s, or they did not arrive. `deltarunner check-weights MODEL` lists the tensors that "
            "arrive",
            version,
            ranks,
            self.dtype,
        )

    # --- operations of each kind of engine

    @abstractmethod
    async def check_weights(self, given: Any) -> Any:
        """Compare new weights with the model while the engine runs; return the argument for `load_weights`.

        Raises:
            BadWeights: the weights do not fit; the message names the tensor.
        """

    @abstractmethod
    async def load_weights(self, checked: Any, version: str) -> None:
        """Exchange the weights, and drop all cached prompts."""

    async def load_and_compare(self, checked: Any, version: str, *, compares: bool) -> bool | None:
        """Exchange the weights. An engine that can score also compares its scores before and after.

        Args:
            checked: the result of `check_weights`.
            version: name of the new weights.
            compares: False if the scores of two proofs replace the comparison.

        Returns:
            True if scores of every rank changed, False if all scores of a rank are equal, None if not compared.

        Raises:
            EngineDead: the engine computes NaN or infinity with the new weights.
        """
        await self.load_weights(checked, version)
        return None

    async def score_while_paused(self, ids: Sequence[int]) -> ScoresByPass:
        """Score ids while no turn runs, first as a prompt on every rank, then in steps; return the log-probabilities.

        Raises:
            BadControl: the engine cannot score.
        """
        raise BadControl("update_weights(proof=): this engine cannot score ids: leave the proof out.")

    def ended_by(self, why: str) -> EngineError:
        """End the engine for this reason, and return the error that every request receives."""
        # This method is not abstract, since an engine that cannot score never receives a proof.
        raise NotImplementedError(f"{type(self).__name__} scores ids and has to implement ended_by()")
