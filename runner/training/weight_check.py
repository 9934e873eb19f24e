"""A check that an engine loads new weights correctly.

Each kind of tensor is changed separately, and the engine's scores are compared with those of transformers.
"""

from __future__ import annotations

import enum
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from runner.engines.controllable import scores_by_pass
from runner.engines.proofs import (
    Accepted,
    ProofFigures,
    ScoredPass,
    ScoresByPass,
    WeightProof,
    compare_in_steps,
    compare_scores,
    failure_reason,
    shows_arrival,
    tolerance_in_steps,
    tolerance_of,
)
from runner.engines.state import EngineState, PauseMode
from runner.engines.vllm.engine import VllmEngine, dtype_of
from runner.engines.weights import LocalTransfer
from runner.errors import BadInput, BadModel, BadOption, DeltarunnerError, EngineError, one_line, unwrapped
from runner.models import DEMO_MODEL, resolve_model
from runner.training.check_inputs import (
    DEFAULT_ADAPTER_RANK,
    adapter_on,
    check_memory,
    linear_kinds,
    local_transfer,
)
from runner.training.tiny_model import float_tensors, save_tiny_model, tensor_kind
from runner.training.turns_across_update import CrossingTurn, turns_across_update
from runner.training.weight_proof import weight_proof

__all__ = ["CheckedTensor", "TensorVerdict", "Way", "WeightReport", "check_weights", "check_weights_async"]

ID_COUNT: Final = 96
"""Number of random ids whose log-probabilities are compared."""
CHANGE_SIZE: Final = 0.3
"""Change of one kind of tensor, in standard deviations of its values."""
WHOLE_CHANGE_SIZE: Final = 0.1
"""Change of all tensors at once. A larger change makes a deep model so sensitive that rounding in bfloat16 looks like a
fault.
"""
EVERYTHING: Final = "all tensors"
ADAPTER: Final = "checked"


class Way(enum.StrEnum):
    """Way to give an engine new weights."""

    FOLDER = "folder"
    """A folder, as `save_pretrained` writes it."""
    STATE_DICT = "state-dict"
    """The model's state dict."""
    TWICE = "twice"
    """Two state dicts in a row, with different changes."""
    UNDER_TURNS = "under-turns"
    """A state dict, sent while turns are sampled. The turns continue with the new weights, and the ids of each weight
    version are compared with those weights."""
    AFTER_SLEEP = "after-sleep"
    """A state dict after `sleep(2)`. On a CPU, vLLM only pauses; the `reason` of the row then has a note."""
    TRANSFER = "transfer"
    """A `LocalTransfer`, twice with different changes: through a file, or through the backend of
    `weight_transfer_config`."""
    SAME = "same"
    """The unchanged starting weights, sent twice."""
    ADAPTER = "adapter"
    """A LoRA adapter of random values on each kind of linear layer, compared with PEFT's forward pass."""


BY_TENSOR: Final = (Way.FOLDER, Way.STATE_DICT, Way.ADAPTER)
"""Ways that change one kind of tensor at a time. The others change all kinds at once."""
IN_A_ROW: Final = (Way.TWICE, Way.TRANSFER, Way.SAME)
"""Ways that update twice and check each update: with different changes, or with the same weights again."""


class TensorVerdict(enum.StrEnum):
    """Result of one update."""

    RIGHT = "right"
    """The engine's scores equal transformers' scores with the new weights, within the tolerance.

    The scores are those of ids in a prompt, and of ids that the engine computes one by one.
    """
    WRONG = "wrong"
    """The scores differ."""
    UNSEEN = "unseen"
    """The change of the log-probabilities is smaller than the usual difference between engine and transformers."""
    REFUSED = "refused"
    """The engine refused the update; `reason` has the cause."""


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """Result of updating one kind of tensor in one way."""

    tensor: str
    """Name of the tensors, with * for the numbers of layers and experts."""
    way: Way
    """Way of the update."""
    verdict: TensorVerdict
    """Result of the update."""
    median: float | None = None
    """Median difference from transformers, in nats; None if the update was refused, or the engine failed."""
    largest: float | None = None
    """Largest difference, in nats; None if the update was refused, or the engine failed."""
    reason: str = ""
    """Reason for a refusal or a wrong result, or a limit of a right result; "" without one."""


@dataclass(slots=True)
class WeightReport:
    """Result of a check of weights."""

    model: str
    """The model, as it was given to the check."""
    dtype: str
    """Number type of the engine's computation."""
    baseline: ProofFigures
    """Difference between the log-probabilities of engine and transformers, with the starting weights."""
    rows: list[CheckedTensor] = field(default_factory=list)
    """Results, one for each kind of tensor and way."""
    failure: str = ""
    """Reason for the early end of the check; empty if the report has all rows."""
    note: str = ""
    """Difference between the checked model and the given one; empty if they are equal."""

    @property
    def right(self) -> list[CheckedTensor]:
        """Rows with right results."""
        return [row for row in self.rows if row.verdict is TensorVerdict.RIGHT]

    @property
    def wrong(self) -> list[CheckedTensor]:
        """Rows with wrong results."""
        return [row for row in self.rows if row.verdict is TensorVerdict.WRONG]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        rows = [asdict(row) for row in self.rows]
        return {
            "model": self.model,
            "dtype": self.dtype,
            "baseline": asdict(self.baseline),
            "rows": rows,
            "failure": self.failure,
            "note": self.note,
        }


def check_weights(
    model: str | Path, *, tiny: bool = False, ways: Sequence[Way | str] = tuple(Way), **engine_arguments: Any
) -> WeightReport:
    """Check that an engine with these options, on this machine, loads new weights of a model correctly.

    The model is also loaded in transformers. Then each kind of tensor is changed separately, the engine is updated, and
    log-probabilities of the same ids are compared. The check takes minutes for a small model, since each row of the
    report needs an update.

    Args:
        model: a folder, a Hugging Face id, or `smollm2-135m`; with `tiny` a folder with a config.json is enough.
        tiny: use the architecture with few layers and random weights, without the model's own weights.
        ways: ways to give new weights.
        engine_arguments: arguments of `VllmEngine`.

    Raises:
        BadModel: transformers or vLLM cannot load the model, or their scores differ before the first update.
        BadOption: a way is unknown, or the memory does not suffice for both models.
    """
    return anyio.run(partial(check_weights_async, model, tiny=tiny, ways=ways, **engine_arguments))


async def check_weights_async(
    model: str | Path,
    *,
    tiny: bool = False,
    ways: Sequence[Way | str] = tuple(Way),
    on_row: Callable[[CheckedTensor], None] = lambda _: None,
    **engine_arguments: Any,
) -> WeightReport:
    """Run `check_weights` on this event loop; `on_row` is called with each row."""
    chosen = [_way(way) for way in ways]
    with tempfile.TemporaryDirectory(prefix="deltarunner-weights-") as scratch:
        dtype = str(engine_arguments.get("dtype", "auto"))
        load = partial(_load, model, tiny=tiny, scratch=Path(scratch), dtype=dtype)
        folder, reference = await anyio.to_thread.run_sync(load)
        note = await anyio.to_thread.run_sync(_note, model) if tiny else ""
        trial = _Trial(folder, reference, Path(scratch), engine_arguments)
        async with trial.engine_running():
            assert trial.baseline is not None, "measured at the start"
            report = WeightReport(str(model), trial.dtype, trial.baseline, note=note)
            # Adapters need another engine, so they are last.
            planned = [(kind, way) for way in sorted(chosen, key=Way.ADAPTER.__eq__) for kind in trial.kinds_of(way)]
            for kind, way in planned:
                try:
                    row = await trial.checked(kind, way)
                except (DeltarunnerError, OSError) as error:  # the engine does not start again, or the disk is full
                    left = len(planned) - len(report.rows)
                    report.failure = f"the last {left} rows are missing, from {kind} ({way}) on: {one_line(error)}"
                    break
                report.rows.append(row)
                on_row(row)
        return report


def _way(way: Way | str) -> Way:
    if way not in list(Way):
        raise BadOption(f"check_weights(ways={way!r}): give some of {', '.join(Way)}.")
    return Way(way)


def _load(model: str | Path, *, tiny: bool, scratch: Path, dtype: str) -> tuple[Path, Any]:
    """Return the folder for the engine's start, and the model in transformers, in float32.

    Raises:
        BadModel: transformers cannot load the model.
        BadOption: the memory does not suffice for the model and the engine.
    """
    import torch
    import transformers

    if tiny:
        source = _source(model)
        own = any(source.glob("tokenizer*"))
        demo = resolve_model(DEMO_MODEL).folder
        vocabulary = None if own else transformers.AutoConfig.from_pretrained(demo).vocab_size
        folder = scratch / "start"
        return folder, save_tiny_model(source, folder, tokenizer=source if own else demo, vocabulary=vocabulary)
    folder = resolve_model(model).folder
    check_memory(folder, dtype, on_cpu=not torch.cuda.is_available())
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # models of transformers may raise anything
        raise BadModel(f"transformers cannot load {model}: {one_line(error)}") from error
    return folder, loaded.eval()


def _source(model: str | Path) -> Path:
    """Return the folder with a model's config.json; its weights may be missing."""
    return Path(model) if (Path(model) / "config.json").is_file() else resolve_model(model).folder


def _note(model: str | Path) -> str:
    """Return a note for a quantized model, whose tiny model is not quantized; "" for any other model."""
    quantization = json.loads((_source(model) / "config.json").read_text()).get("quantization_config")
    if not quantization:
        return ""
    return (
        f"the weights are quantized ({quantization.get('quant_method')}), and those of the tiny model are not: "
        "quantized layers were not checked. Give each update a proof: update_weights(proof=)"
    )


class _Trial:
    """Engine and reference: the same model in vLLM and in transformers."""

    def __init__(self, folder: Path, reference: Any, scratch: Path, engine_arguments: dict[str, Any]) -> None:
        self.folder, self.reference, self._scratch = folder, reference, scratch
        self._arguments = {"max_model_len": 512, "max_num_seqs": 8, **engine_arguments}
        if "worker_extension_cls" not in engine_arguments:
            self._arguments.setdefault("weight_transfer_config", {"backend": "file"})
        self._transfer: LocalTransfer | None = None
        self._turns: Sequence[CrossingTurn] = ()
        self._takes_adapters = False
        self._adapters_refused = ""
        self._first = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
        self._kinds = tuple(dict.fromkeys(map(tensor_kind, float_tensors(reference))))
        self._is_broken = False
        self.engine: VllmEngine
        self.baseline: ProofFigures | None = None
        self._baseline_in_steps: ProofFigures | None = None
        self.dtype = self._computed_in = ""
        self._accepted: Accepted
        self._exit = AsyncExitStack()

    def kinds_of(self, way: Way) -> Sequence[str]:
        """Return the kinds of tensors to check with `way`, each in its own check.

        The only kind is `EVERYTHING` if `way` changes all kinds at once.
        """
        if way is Way.ADAPTER:
            return linear_kinds(self.reference)
        return self._kinds if way in BY_TENSOR else (EVERYTHING,)

    @asynccontextmanager
    async def engine_running(self) -> AsyncIterator[None]:
        """Start the engine for this block. Another engine may replace it during the block."""
        try:
            await self._start()
            yield
        finally:
            await self._exit.aclose()

    async def _start(self) -> None:
        """Start an engine with the first weights, and replace an earlier one.

        Raises:
            BadModel: the scores of engine and transformers differ with the first weights.
        """
        await self._exit.aclose()
        self._exit = AsyncExitStack()
        self._transfer = None
        adapters = {"enable_lora": True, "max_lora_rank": DEFAULT_ADAPTER_RANK} if self._takes_adapters else {}
        self.engine = engine = VllmEngine(self.folder, **{**adapters, **self._arguments})
        await self._exit.enter_async_context(engine)
        self.dtype = dtype_of(engine.vllm.llm)
        self._computed_in = engine.vllm.proofs.quantization or self.dtype
        proof = await self._proof()
        scores = await scores_by_pass(engine, proof.ids)
        of_prompt = scores[ScoredPass()]
        self.baseline, self._baseline_in_steps = self._compared(proof, of_prompt, None), None
        if why := self._reason(proof, scores, self.baseline, None):
            raise BadModel(f"vLLM and transformers compute different scores with the model's own weights: {why}.")
        self._accepted = Accepted(proof, of_prompt)
        if (in_steps := scores.get(ScoredPass(in_steps=True))) is not None:
            self._baseline_in_steps, _ = self._compared_in_steps(proof, in_steps)

    def _reason(self, proof: WeightProof, scores: ScoresByPass, figures: ProofFigures, before: Accepted | None) -> str:
        """Return the reason why scores differ from a proof, or ""."""
        why = failure_reason(figures, proof, scores[ScoredPass()], before)
        in_steps = scores.get(ScoredPass(in_steps=True))
        return why if why or in_steps is None else self._compared_in_steps(proof, in_steps)[1]

    def _compared_in_steps(self, proof: WeightProof, in_steps: Sequence[float]) -> tuple[ProofFigures, str]:
        # Without a baseline in steps, as for the first weights, `tolerance_of` returns the tolerance of its table.
        baselines = self.baseline, self._baseline_in_steps
        allowed = tolerance_in_steps(*(tolerance_of(proof, self._computed_in, each) for each in baselines))
        return compare_in_steps(proof, in_steps, allowed, engine_dtype=self._computed_in)

    async def _proof(self, model: Any = None, ids: Sequence[int] | None = None) -> WeightProof:
        model = self.reference if model is None else model
        if ids is None:
            rng = random.Random(0)
            ids = [rng.randrange(self.reference.config.get_text_config().vocab_size) for _ in range(ID_COUNT)]
        return await anyio.to_thread.run_sync(partial(weight_proof, model, ids=ids, dtype=self.dtype))

    async def checked(self, kind: str, way: Way) -> CheckedTensor:
        """Change one kind of tensor, update the engine and compare; then restore the first weights.

        Raises:
            DeltarunnerError: an engine that an earlier row broke does not start again, or the model computes NaN.
        """
        if self._is_broken:
            await self._start()
            self._is_broken = False
        try:
            row = await (self._checked_adapter(kind) if way is Way.ADAPTER else self._checked_update(kind, way))
        except EngineError as error:
            reason = f"the engine failed during the update or the scoring: {one_line(error)}"
            row = CheckedTensor(kind, way, TensorVerdict.WRONG, reason=reason)
        except BadInput as error:
            row = CheckedTensor(kind, way, TensorVerdict.REFUSED, reason=one_line(error))
        finally:
            self.reference.load_state_dict(self._first)
        # The refusal may come while the engine is asleep or has no weights.
        self._is_broken = row.verdict is TensorVerdict.WRONG or self.engine.state is not EngineState.RUNNING
        return row

    async def _checked_update(self, kind: str, way: Way) -> CheckedTensor:
        for seed in range(1, 3 if way in IN_A_ROW else 2):
            self.reference.load_state_dict(self._first)
            self._change(kind if way is not Way.SAME else "", seed)
            proof = await self._proof()
            await self._give(way)
            row = self._judged(kind, way, proof, await scores_by_pass(self.engine, proof.ids))
            if row.verdict is not TensorVerdict.RIGHT:
                break
        if way is Way.UNDER_TURNS and row.verdict is TensorVerdict.RIGHT and (why := await self._reason_in_turns()):
            row = replace(row, verdict=TensorVerdict.WRONG, reason=why)
        if way is Way.AFTER_SLEEP and not row.reason and "cpu" in await self.engine.devices():
            row = replace(row, reason="on a CPU, vLLM only pauses in sleep, and keeps its memory")
        return row

    async def _reason_in_turns(self) -> str:
        """Return the reason why some ids of the turns do not fit the weights of their version, or ""."""
        parts: dict[str, Callable[[CrossingTurn], slice]] = {"new": lambda turn: turn.new, "old": lambda turn: turn.old}
        for name, part in parts.items():
            if name == "old":
                self.reference.load_state_dict(self._first)
            ids, wanted, given = [0], list[float](), list[float]()
            for turn in self._turns:
                whole = await self._proof(ids=turn.ids)
                ids += turn.ids[-len(turn.logprobs) :][part(turn)]
                wanted += turn.sampled_of(whole.logprobs)[part(turn)]
                given += turn.logprobs[part(turn)]
            proof = replace(whole, ids=ids, logprobs=wanted)
            if why := failure_reason(self._compared(proof, given, None), proof, given, None):
                return f"ids that turns sampled with the {name} weights, around the update: {why}"
        return ""

    async def _checked_adapter(self, kind: str) -> CheckedTensor:
        """Add an adapter to one kind of layer, compare scores under it with PEFT, and remove it."""
        await self._start_with_adapters()
        with adapter_on(self.reference, kind) as (adapted, tensors, config):
            proof = await self._proof(adapted)
        await self.engine.add_adapter(ADAPTER, tensors, config=config)
        try:
            scores = await scores_by_pass(self.engine, proof.ids, ADAPTER)
        finally:
            await self.engine.remove_adapter(ADAPTER)
        return self._judged(kind, Way.ADAPTER, proof, scores)

    async def _start_with_adapters(self) -> None:
        """Start the engine again with adapters, once.

        Raises:
            BadOption: the engine does not start with adapters, now or in an earlier call.
        """
        if not self._takes_adapters:
            self._takes_adapters = True
            try:
                await self._start()
            except DeltarunnerError as error:
                self._adapters_refused = f"the engine does not start with adapters: {one_line(error)}"
        if self._adapters_refused:
            raise BadOption(self._adapters_refused)

    def _judged(self, kind: str, way: Way, proof: WeightProof, scores: ScoresByPass) -> CheckedTensor:
        figures = self._compared(proof, scores[ScoredPass()], self._accepted)
        why = self._reason(proof, scores, figures, self._accepted)
        verdict = TensorVerdict.WRONG if why else TensorVerdict.RIGHT
        if not why and way is not Way.SAME and not self._is_seen(figures, proof):
            verdict = TensorVerdict.UNSEEN
        return CheckedTensor(kind, way, verdict, figures.median, figures.largest, why)

    def _is_seen(self, figures: ProofFigures, proof: WeightProof) -> bool:
        """Return True if the change is certainly in the scores.

        If the share of the change that arrived is unknown, return True if the old weights would have failed.
        """
        if figures.arrived is not None:
            return shows_arrival(figures)
        return not self._compared(proof, self._accepted.scores, None).holds

    def _compared(self, proof: WeightProof, scores: Sequence[float], before: Accepted | None) -> ProofFigures:
        tolerance = tolerance_of(proof, self._computed_in, self.baseline)
        return compare_scores(proof, scores, tolerance, before, engine_dtype=self._computed_in)

    def _change(self, kind: str, seed: int) -> None:
        """Add noise to all tensors of a kind, or to all tensors for `EVERYTHING`; "" changes nothing.

        The size of the noise is a share of the standard deviation of the tensor.
        """
        import torch

        size = WHOLE_CHANGE_SIZE if kind == EVERYTHING else CHANGE_SIZE
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in float_tensors(self.reference).items():
                if kind in (EVERYTHING, tensor_kind(name)):
                    spread = max(float(tensor.float().std()) if tensor.numel() > 1 else 0.0, 0.02)
                    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                    tensor.add_(noise * spread * size)

    async def _give(self, way: Way) -> None:
        """Update the engine to the reference's weights."""
        engine = self.engine
        if way is Way.FOLDER:
            new = self._scratch / "new"
            await anyio.to_thread.run_sync(self.reference.save_pretrained, new)
            await engine.update_weights(new)
        elif way is Way.UNDER_TURNS:
            await engine.update_weights(self._first)  # an earlier way may have left other weights
            update = partial(engine.update_weights, self.reference.state_dict(), mode=PauseMode.KEEP)
            try:
                self._turns = await turns_across_update(engine, update)
            except BaseExceptionGroup as error:
                raise unwrapped(error) from None
        elif way is Way.TRANSFER:
            self._transfer = self._transfer or local_transfer(self._arguments, self.reference, self._scratch)
            await engine.update_weights(self._transfer)  # trainer and engine connect only once
        elif way is Way.AFTER_SLEEP:
            await engine.sleep(2)
            await engine.wake(["weights"])
            await engine.update_weights(self.reference.state_dict())
            await engine.wake(["kv_cache"])
        else:
            await engine.update_weights(self.reference.state_dict())
