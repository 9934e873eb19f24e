"""An engine compares its own scores around an update: weights that do not arrive, and its own weights loaded again."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from runner import BadControl, BadWeights, EngineDead, VllmEngine, WeightProof
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import ScoredPass, ScoresByPass, ids_in_steps
from runner.engines.vllm.own_scores import SAMPLE_SIZE, OwnScores
from runner.engines.vllm.runtime import VllmRuntime
from runner.errors import RequestRejected
from runner.testing.engine_pool import PooledEngine
from runner.training import weight_proof
from runner.training.check_inputs import adapter_on, linear_kinds
from tests.engines.stale_worker import GARBLED
from tests.engines.test_proofs import step
from tests.engines.vllm.test_runtime import Llm, Weights, engine_of

pytestmark = pytest.mark.anyio

LOG = "deltarunner.engines"


class Engine:
    """Scores that a test changes: an offset for all ids, and noise that differs in each pass."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks, self.offset, self.noise, self.refuses, self.passes = ranks, 0.0, 0.0, False, 0

    async def __call__(self, ids: Sequence[int]) -> ScoresByPass:
        if self.refuses:
            raise RequestRejected("no scores here")
        self.passes += 1
        shift = self.offset + self.noise * (self.passes % 2)
        return {ScoredPass(rank): [-1.0 - shift - each / 1e6 for each in ids[1:]] for rank in range(self.ranks)}

    def own_scores(self, **changed: Any) -> OwnScores:
        return OwnScores(self, **{"vocabulary": 1000, "context": 4096, "dtype": "float32", **changed})


async def test_scores_count_as_moved_only_after_they_change() -> None:
    engine = Engine()
    own = engine.own_scores()
    assert await own.take()
    assert await own.moved() is False
    engine.offset = 1e-4
    assert await own.take()
    assert await own.moved() is True


async def test_scores_are_computed_once_for_an_update_after_the_first() -> None:
    engine = Engine()
    own = engine.own_scores()
    await own.take()
    assert engine.passes == 2, "the second pass measures the noise"
    await own.moved()
    await own.take()
    await own.moved()
    assert engine.passes == 4
    own.forget()
    await own.take()
    assert engine.passes == 5


async def test_noise_between_two_passes_does_not_count_as_moved() -> None:
    engine = Engine()
    engine.noise = 0.01
    own = engine.own_scores()
    await own.take()
    assert await own.moved() is False
    engine.offset = 0.1
    assert await own.moved() is True


class Ranks(Engine):
    """Two ranks. The second has an offset of its own."""

    value = -1.0

    async def __call__(self, ids: Sequence[int]) -> ScoresByPass:
        scores = await super().__call__(ids)
        return {**scores, ScoredPass(1): [self.value] * (len(ids) - 1)}


@pytest.mark.parametrize(("offset", "value", "moved"), [(0.1, -1.0, False), (0.0, -1.1, False), (0.1, -1.1, True)])
async def test_every_rank_has_to_move(offset: float, value: float, moved: bool) -> None:
    engine = Ranks(2)
    own = engine.own_scores()
    await own.take()
    engine.offset, engine.value = offset, value
    assert await own.moved() is moved
    assert own.broken == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_rank_whose_scores_become_nan_or_infinity_is_broken(value: float) -> None:
    engine = Ranks(2)
    own = engine.own_scores()
    await own.take()
    engine.value = value
    await own.moved()
    assert own.broken == [1]


async def test_scores_in_steps_count_as_those_of_a_prompt() -> None:
    """An engine may compute sampled ids with copies of the weights that it does not use for a prompt."""
    engine, in_steps = Engine(), [-1.0]

    async def score(ids: Sequence[int]) -> ScoresByPass:
        return {**await engine(ids), ScoredPass(in_steps=True): in_steps * (len(ids_in_steps(ids)) - 1)}

    own = OwnScores(score, vocabulary=1000, context=4096, dtype="float32")
    await own.take()
    engine.offset = 0.1
    assert await own.moved() is False, "only the scores of a prompt changed"
    in_steps[0] = -1.2
    figures = await own.compare()
    assert not figures.holds
    assert figures.ids == 16


class Updated(VllmRuntime):
    """A runtime with the scores of `Ranks`, which each load of weights changes."""

    def __init__(self, scores: Ranks) -> None:
        self.own_scores, self.scores, self.dtype = scores.own_scores(), scores, "float32"
        self.asleep, self.weights_discarded, self.reload_check = frozenset(), False, False
        self.gate = AdmissionGate(8, 1000, ranks=scores.ranks)

    async def load_weights(self, checked: Any, version: str) -> None:
        self.scores.offset, self.scores.value = checked

    def ended_by(self, why: str) -> EngineDead:
        return EngineDead(why)


async def test_weights_with_which_a_rank_computes_nan_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Updated(Ranks(2))
    assert await runtime.load_and_compare((0.1, -1.1), "1", compares=True) is True
    assert not caplog.records
    assert await runtime.load_and_compare((0.2, -1.1), "2", compares=True) is False
    assert "the weights '2' change no score of the engine or of one of its data-parallel ranks" in caplog.text
    with pytest.raises(
        EngineDead, match="the engine of data-parallel rank 1 computes NaN or infinity with the weights"
    ):
        await runtime.load_and_compare((0.3, math.nan), "3", compares=True)


async def test_unchanged_infinite_score_counts_as_equal() -> None:
    engine = Ranks(2)
    engine.value = -math.inf  # a model that excludes ids
    own = engine.own_scores()
    await own.take()
    engine.offset = 0.1
    assert await own.moved() is False
    assert own.broken == []


async def test_an_engine_that_refuses_to_score_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.refuses = True
    own = engine.own_scores()
    with caplog.at_level(logging.WARNING, LOG):
        assert not await own.take()
    assert "the engine does not score ids: no scores here" in caplog.text
    engine.refuses = False
    assert not await own.take()
    assert await own.moved() is None
    assert engine.passes == 0


@pytest.mark.parametrize("context", [9, 10, 4096])
async def test_ids_fit_the_context(context: int) -> None:
    seen: list[int] = []

    async def score(ids: Sequence[int]) -> ScoresByPass:
        seen.append(len(ids))
        return {ScoredPass(): [-1.0] * (len(ids) - 1)}

    own = OwnScores(score, vocabulary=50, context=context, dtype="float32")
    assert await own.take() == (context > 9)
    assert not seen or seen[0] == min(context - 1, SAMPLE_SIZE)


# --- reload of the engine's own weights, on a stand-in for vLLM


class Loaded(Weights):
    """Weights with their own files, and scores that depend on the last load."""

    def __init__(self, llm: Llm) -> None:
        super().__init__(llm)
        self.loads: list[str] = []

    async def check_own(self) -> Any:
        return "own"

    async def load(self, checked: str) -> None:
        self.loads.append(checked)
        await super().load(checked)

    async def score(self, ids: Sequence[int]) -> ScoresByPass:
        last = ["own", "new", "newer"].index(self.loads[-1]) if self.loads else 0
        return {ScoredPass(): [-1.0 - last - each / 1e6 for each in ids[1:]]}


async def test_an_update_drops_keys_that_a_connector_stores() -> None:
    llm = Llm()
    llm.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="OffloadingConnector")
    await engine_of(llm).update_weights("folder")
    assert "reset running=True connector=True" in llm.asked


class Garbled(Loaded):
    """Weights with other scores after each load, also of its own weights."""

    async def score(self, ids: Sequence[int]) -> ScoresByPass:
        return {ScoredPass(): [-1.0 - len(self.loads) - each / 1e6 for each in ids[1:]]}


class Overwritten(Loaded):
    async def check_own(self) -> Any:
        return None


def engine_with(weights: Loaded) -> VllmEngine:
    engine = engine_of(weights.llm)
    runtime = engine.vllm
    runtime.weights = weights  # type: ignore[assignment]  # has the two methods that are called
    runtime.own_scores = OwnScores(weights.score, vocabulary=1000, context=4096, dtype="float32")
    runtime.reload_check = True
    return engine


@pytest.mark.parametrize("level", [1, 2])
async def test_own_weights_are_loaded_again_before_the_first_sleep(level: Literal[1, 2]) -> None:
    """A trainer that shares the GPU updates weights while the cache is asleep, when ids cannot be scored."""
    weights = Loaded(Llm())
    engine = engine_with(weights)
    await engine.sleep(level)
    assert weights.loads == ["own"]
    await engine.wake(["weights"])
    await engine.update_weights("new")
    await engine.wake(["kv_cache"])
    await engine.sleep(level)
    await engine.wake()
    await engine.update_weights("newer")
    assert weights.loads == ["own", "new", "newer"]


async def test_reload_that_changes_scores_ends_the_engine_at_its_sleep() -> None:
    weights = Garbled(Llm())
    engine = engine_with(weights)
    with pytest.raises(EngineDead, match="a reload of its own weights before the first update changed"):
        await engine.sleep(2)
    assert "sleep 2" not in weights.llm.asked


async def test_own_weights_whose_files_changed_are_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    weights = Overwritten(Llm())
    engine = engine_with(weights)
    await engine.update_weights("new")
    assert weights.loads == ["new"]
    assert any("since their files changed: give each update a proof" in each.message for each in caplog.records)


@pytest.mark.parametrize(("load_format", "checked"), [("auto", True), ("safetensors", True), ("dummy", False)])
async def test_own_weights_are_loaded_again_only_from_files(load_format: str, checked: bool) -> None:
    llm = Llm()
    llm.vllm_config.model_config = SimpleNamespace(is_moe=True, has_inner_state=False)
    llm.vllm_config.load_config = SimpleNamespace(load_format=load_format)
    engine = engine_of(llm)
    engine.vocabulary, engine.context = 1000, 100

    async def answer(name: str) -> bool:
        return True

    llm.engine_core.call_utility_async = answer
    await engine._compare_updates(llm)
    assert engine.vllm.own_scores is not None
    assert engine.vllm.reload_check == checked


# --- the real engine


@pytest.mark.engine
def test_an_update_that_moves_no_score_is_noticed_and_said(
    float32_engine: PooledEngine, hugging_face_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    changed = copy.deepcopy(hugging_face_model)
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight.mul_(1.001)

    async def main() -> None:
        engine = float32_engine
        await engine.update_weights(hugging_face_model.state_dict())
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOG):
            same = await engine.update_weights(hugging_face_model.state_dict(), version="the same")
            assert same.moved is False
            assert "the weights 'the same' change no score of the engine" in caplog.text
            caplog.clear()
            other = await engine.update_weights(changed.state_dict())
            assert other.moved is True
            assert not caplog.records
        proof = WeightProof(range(20, 40), await engine.score(range(20, 40)))
        assert (await engine.update_weights(changed.state_dict(), proof=proof)).moved is False
        assert (await engine.update_weights(changed.state_dict(), proof=proof)).moved is False
        assert (await engine.update_weights(hugging_face_model.state_dict())).moved is True

    float32_engine.home.call(main)


@pytest.mark.engine
def test_own_weights_are_loaded_once_more_before_the_first_update(
    float32_engine: PooledEngine, hugging_face_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        inner = float32_engine.inner
        assert isinstance(inner, VllmEngine)
        runtime, loads = inner.vllm, []
        load = runtime.weights.load

        async def counted(checked: Any) -> None:
            loads.append(checked)
            await load(checked)

        monkeypatch.setattr(runtime.weights, "load", counted)
        monkeypatch.setattr(runtime, "reload_check", True)
        await float32_engine.update_weights(hugging_face_model.state_dict())
        assert [each.folder is not None for each in loads] == [True, False]
        await float32_engine.update_weights(hugging_face_model.state_dict())
        assert len(loads) == 3

    float32_engine.home.call(main)


@pytest.mark.engine
def test_overwritten_weight_files_are_not_checked_as_own(
    float32_engine: PooledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        inner = float32_engine.inner
        assert isinstance(inner, VllmEngine)
        weights = inner.vllm.weights
        assert (own := await weights.check_own()) is not None
        assert own.folder is not None
        monkeypatch.setattr(weights, "_signature", (("model.safetensors", 1, 1),))
        assert await weights.check_own() is None

    float32_engine.home.call(main)


@pytest.mark.engine
def test_a_proof_is_refused_by_name_where_turns_cannot_be_held(
    float32_engine: PooledEngine, hugging_face_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        inner = float32_engine.inner
        assert isinstance(inner, VllmEngine)
        monkeypatch.setattr(inner.vllm, "own_scores", None)
        before = inner.weight_version
        proof = WeightProof(range(20, 40), [-1.0] * 19)
        with pytest.raises(BadControl, match="this version of vLLM cannot hold its turns"):
            await inner.update_weights(hugging_face_model.state_dict(), proof=proof)
        assert inner.weight_version == before
        assert (await inner.update_weights(hugging_face_model.state_dict())).moved is None

    float32_engine.home.call(main)


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_engine_that_garbles_its_own_weights_is_ended(
    small_model_folder: Path,
) -> None:
    async def first_update(**options: Any) -> None:
        engine = VllmEngine(
            small_model_folder,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=4,
            worker_extension_cls=GARBLED,
            **options,
        )
        async with engine:
            before = await engine.score(range(20, 60))
            await engine.update_weights(small_model_folder)
            assert await engine.score(range(20, 60)) != before, "without the check, scores change without an error"

    await first_update()
    with pytest.raises(EngineDead, match="a reload of its own weights before the first update changed"):
        await first_update(reload_check=True)


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.asyncio_alone
async def test_own_weights_are_loaded_again_beside_an_adapter(small_model_folder: Path) -> None:
    """The adapter stays unchanged, and each update under it is proven."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    trainer = AutoModelForCausalLM.from_pretrained(small_model_folder, dtype="float32")
    kind = linear_kinds(trainer)[0]
    options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "max_num_seqs": 4}
    async with VllmEngine(small_model_folder, template="hermes", reload_check=True, **options) as engine:
        for number in range(2):
            proof = weight_proof(trainer, engine.tokenizer)
            if number:
                update = await engine.update_weights(trainer.state_dict(), proof=proof)
                assert update.proof is not None
            with adapter_on(trainer, kind) as (adapted, tensors, config):
                if not number:
                    await engine.add_adapter("poet", tensors, config=config)
                held = await engine.prove(weight_proof(adapted, engine.tokenizer), "poet")
            assert held.median < 1e-4
            with pytest.raises(BadWeights, match=r"prove\(adapter='poet'\): the engine's log-probabilities differ"):
                await engine.prove(proof, "poet")
            step(trainer)
