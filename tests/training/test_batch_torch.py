"""Training batches in torch: the tensors, and equal results of a model for padded and packed rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner import BadOption
from runner.training.advantages import dr_grpo, grpo
from runner.training.batch import TrainingBatch
from tests.training.making import group, made, prompt, said
from tests.training.test_batch import ARRAYS, pages_names, two


def test_tensors_hold_the_arrays_in_the_types_that_models_take() -> None:
    torch = pytest.importorskip("torch")
    batch = TrainingBatch.packed(two(), length=10, pad_id=0, advantages=dr_grpo)
    tensors = batch.torch()
    assert [field.name for field in dataclasses.fields(tensors)] == [*ARRAYS, "masks"]
    for name in ARRAYS:
        assert getattr(tensors, name).tolist() == getattr(batch, name).tolist()
    whole = ("input_ids", "attention_mask", "position_ids", "segment_ids", "weight_versions")
    assert {getattr(tensors, name).dtype for name in whole} == {torch.int64}
    assert tensors.loss_mask.dtype == torch.bool
    assert {getattr(tensors, name).dtype for name in ("logprobs", "temperatures", "advantages")} == {torch.float32}
    tensors.advantages[:] = 7
    assert batch.advantages.max() == 0.5
    rows = batch.unpadded(tensors.input_ids)
    assert [row.tolist() for row in rows] == [row.ids.tolist() for row in batch.rows]


def test_tensors_are_split_into_parts_that_lose_nothing() -> None:
    torch = pytest.importorskip("torch")
    tensors = TrainingBatch.padded(two(), pad_id=0).torch()
    parts = list(tensors.split(2))
    assert [len(part.input_ids) for part in parts] == [2, 1]
    for name in ARRAYS:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(tensors, name))
    with pytest.raises(BadOption, match="sequences=0: give"):
        next(tensors.split(0))


def tiny_model() -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).double()


def gradients(model: Any, loss: Any) -> list[Any]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_page_loss_is_equal_padded_packed_and_by_row() -> None:
    model, loss = tiny_model(), pages_names()["loss"]
    source = [
        *two(),
        group(made([prompt(3, 1), said(4, 1, 5)], id="t1#0"), made([prompt(6), said(2)], id="t1#1", reward=0)),
    ]
    batches = [
        TrainingBatch.padded(source, pad_id=0, advantages=grpo),
        TrainingBatch.packed(source, length=11, pad_id=0, advantages=grpo),
    ]
    (one, first), (other, second) = [(value := loss(model, batch), gradients(model, value)) for batch in batches]
    assert len(batches[1]) < len(batches[0])
    assert one.item() == pytest.approx(other.item(), rel=1e-6)
    assert all(torch_close(a, b) for a, b in zip(first, second, strict=True))
    alone = sum(loss(model, each).item() * each.trained for each in row_by_row(batches[0]))
    assert one.item() == pytest.approx(alone / batches[0].trained, rel=1e-6)


def row_by_row(batch: TrainingBatch) -> list[TrainingBatch]:
    """Return a batch of one row for each row, with the advantages that the row has in `batch`."""
    parts = []
    for index, row in enumerate(batch.rows):
        arrays = {name: batch.unpadded(getattr(batch, name))[index][None] for name in ARRAYS}
        parts.append(dataclasses.replace(batch, rows=(row,), **arrays))
    return parts


def torch_close(one: Any, other: Any) -> bool:
    return bool((one - other).abs().max().item() < 1e-6)


def test_packed_rows_mix_with_a_mask_or_a_cache() -> None:
    model = tiny_model()
    batch = TrainingBatch.packed(two(), length=10, pad_id=0)
    tensors = batch.torch()
    alone = model(input_ids=tensors.input_ids[:1, 7:]).logits[0]
    inputs = tensors.model_inputs

    def packed(**more: Any) -> Any:
        return batch.unpadded(model(**{**inputs, **more}).logits)[1]

    assert torch_close(packed(), alone)
    assert not torch_close(packed(attention_mask=tensors.attention_mask), alone)
    assert not torch_close(packed(use_cache=True), alone)
