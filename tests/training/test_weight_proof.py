"""Weight proofs of a torch model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from runner import BadModel, BadWeights
from runner.training import weight_proof

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def model() -> Any:
    """A tiny model with a tied output layer, in training mode, whose weights are not exact in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True, attention_dropout=0.5)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(7.3)  # so that logits differ clearly
    return made.train()


def test_a_proof_has_the_models_own_log_probabilities_without_dropout(model: Any) -> None:
    proof = weight_proof(model, ids=range(40))
    with torch.no_grad():
        logits = model.eval()(torch.arange(40)[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[torch.arange(39), torch.arange(1, 40)]
    assert np.allclose(proof.logprobs, expected.numpy(), atol=1e-6)
    assert (proof.dtype, proof.weights_dtype) == ("float32", "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_weights_are_rounded_in_a_copy_to_the_engines_dtype(model: Any, dtype: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    proof = weight_proof(model, ids=range(40), dtype=dtype)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training

    name = str(dtype).removeprefix("torch.")
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():  # buffers, such as the frequencies of positions, are not rounded
            parameter.copy_(parameter.to(getattr(torch, name)))
    assert proof.logprobs == weight_proof(rounded, ids=range(40)).logprobs
    assert proof.logprobs != weight_proof(model, ids=range(40)).logprobs
    assert (proof.dtype, proof.weights_dtype) == ("float32", name)


def test_a_wider_dtype_changes_nothing(model: Any) -> None:
    proof, own = (weight_proof(model.bfloat16(), ids=range(40), dtype=dtype) for dtype in ("float32", None))
    assert proof.logprobs == own.logprobs
    assert proof.weights_dtype == own.weights_dtype == "bfloat16"


def float32_logits(model: Any) -> Any:
    """Return the model with its output in float32, for any dtype of computation."""
    return model.register_forward_hook(lambda _, __, output: output.logits.float())


def test_number_type_is_the_weights_where_the_logits_are_finer(model: Any) -> None:
    float32_logits(model.bfloat16())
    assert weight_proof(model, ids=range(40)).dtype == "bfloat16"


def test_number_type_is_that_of_the_coarsest_weights(model: Any) -> None:
    model.model.layers[0].mlp.to(torch.bfloat16)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output.float())
    assert weight_proof(model, ids=range(40)).dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])
def test_number_type_is_that_of_autocast(model: Any, dtype: Any, inside: bool) -> None:
    autocast = torch.autocast("cpu", dtype=dtype)
    float32_logits(model)
    if inside:  # as accelerate wraps a model
        model.forward = autocast(model.forward)
        proof = weight_proof(model, ids=range(40))
    else:
        with autocast:
            proof = weight_proof(model, ids=range(40))
    assert (proof.dtype, proof.weights_dtype) == (str(dtype).removeprefix("torch."), "float32")
    assert not any(module._forward_pre_hooks for module in model.modules()), "the model is unchanged"


@pytest.mark.parametrize("dtype", ["bf17", "int8", "nn"])
def test_a_dtype_that_torch_does_not_compute_in_is_refused(model: Any, dtype: str) -> None:
    with pytest.raises(BadModel, match=rf"weight_proof\(dtype='{dtype}'\): torch has no such floating-point type"):
        weight_proof(model, ids=range(40), dtype=dtype)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "0 ids are too few for a proof; give a few hundred, at least 9"),
        (range(5), "5 ids are too few for a proof"),
        ([*range(20), 10**6], r"does not have the id 1000000; its ids are 0 to \d+\. Give ids of this"),
        ([*range(20), -1], "does not have the id -1"),
        (["a"] * 20, r"weight_proof\(ids=\): .*give token ids, whole numbers"),
        ([[1, 2]] * 20, "give token ids, whole numbers"),
    ],
)
def test_ids_that_a_model_does_not_have_are_refused(model: Any, ids: Any, said: str) -> None:
    with pytest.raises(BadWeights, match=said):
        weight_proof(model, ids=ids)
    assert model.training


def test_ids_may_be_a_tensor_or_an_array(model: Any) -> None:
    forms: tuple[Any, ...] = (range(40), torch.arange(40), np.arange(40))
    proofs = [weight_proof(model, ids=ids) for ids in forms]
    assert proofs[0].logprobs == proofs[1].logprobs == proofs[2].logprobs


def test_proof_of_something_else_than_a_model_is_refused(model: Any) -> None:
    with pytest.raises(BadModel, match="str is not a torch model with parameters"):
        weight_proof("checkpoints/step-7", ids=range(40))
    with pytest.raises(BadModel, match="Identity is not a torch model with parameters"):
        weight_proof(torch.nn.Identity(), ids=range(40))
    with pytest.raises(BadModel, match="Bare has no config with a vocab_size: give a tokenizer, or ids="):
        weight_proof(Bare(model))
    assert weight_proof(Bare(model), ids=range(40)).logprobs == weight_proof(model, ids=range(40)).logprobs


class Bare(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A wrapper of a model, without its configuration."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        return self.model(ids)
