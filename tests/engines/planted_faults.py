"""Faults of new weights that proofs must find, and a trial of an engine with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from runner.engines.base import Engine
from runner.engines.controllable import Controllable
from runner.engines.proofs import (
    STEP_PLACES,
    Accepted,
    ProofFigures,
    ProofTolerance,
    WeightProof,
    compare_in_steps,
    compare_scores,
    failure_reason,
    tolerance_of,
)
from runner.options import Sampling
from runner.training import weight_proof

__all__ = ["EXPERT_FAULTS", "STEP_RATIO", "Fault", "Trial", "faults", "stepped"]

STEP_RATIO: Final = 0.01
"""Change of an optimizer's step, in standard deviations of each tensor."""
Tensors = dict[str, Any]
Fault = Callable[[Tensors, Tensors], None]
"""Function that plants a fault in new tensors, given the old ones."""

KINDS: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


def stale(*parts: str) -> Fault:
    """Return a fault in which every tensor whose name contains one of the parts keeps its old values."""

    def plant(new: Tensors, old: Tensors) -> None:
        new.update({name: old[name].clone() for name in new if any(part in name for part in parts)})

    return plant


def scaled(name: str, factor: float) -> Fault:
    return lambda new, old: new.update({name: new[name] * factor})


def swapped(name: str, other: str) -> Fault:
    return lambda new, old: new.update({name: new[other].clone(), other: new[name].clone()})


def swapped_blocks(*names: str, size: int = 1, axis: int = 0) -> Fault:
    """Return a fault that swaps the first two blocks of an axis: heads, experts, or halves."""

    def plant(new: Tensors, old: Tensors) -> None:
        for name in names:
            new[name] = new[name].clone()
            blocks = new[name].narrow(axis, 0, 2 * size)
            blocks.copy_(blocks.roll(size, axis))

    return plant


def stale_block(*names: str) -> Fault:
    """Return a fault in which the first block of the first axis keeps its old values: one expert."""

    def plant(new: Tensors, old: Tensors) -> None:
        for name in names:
            new[name] = new[name].clone()
            new[name][0] = old[name][0]

    return plant


def half_loaded(name: str) -> Fault:
    """Return a fault in which the second half of the rows keeps its old values."""

    def plant(new: Tensors, old: Tensors) -> None:
        middle = len(new[name]) // 2
        new[name] = new[name].clone()
        new[name][middle:] = old[name][middle:]

    return plant


def faults(config: Any) -> dict[str, Fault]:
    """Thirty faults in the weights of a Llama, by their names."""
    number = config.num_hidden_layers // 4
    layer, head_size = f"model.layers.{number}.", config.hidden_size // config.num_attention_heads
    upper = [f"layers.{each}." for each in range(config.num_hidden_layers // 2, config.num_hidden_layers)]
    found: dict[str, Fault] = {"every tensor is stale": stale("")}
    found |= {f"{kind} is stale in one layer": stale(f"{layer}{kind}.") for kind in KINDS}
    found |= {f"{kind} is stale in all layers": stale(f".{kind}.") for kind in KINDS}
    return found | {
        "the embedding is stale": stale("embed_tokens"),
        "the last norm is stale": stale("model.norm."),
        "one layer is stale": stale(layer),
        "the upper half of the layers is stale": stale(*upper),
        "one tensor is 1% too large": scaled(f"{layer}mlp.down_proj.weight", 1.01),
        "one tensor is 10% too large": scaled(f"{layer}mlp.down_proj.weight", 1.1),
        "two heads are swapped": swapped_blocks(f"{layer}self_attn.q_proj.weight", size=head_size),
        "two heads of keys are swapped": swapped_blocks(f"{layer}self_attn.k_proj.weight", size=head_size),
        "the halves of a fused projection are swapped": swapped(
            f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"
        ),
        "two layers are swapped in one tensor": swapped(
            f"{layer}self_attn.o_proj.weight", f"model.layers.{number + 1}.self_attn.o_proj.weight"
        ),
        "a tensor came by half": half_loaded(f"{layer}mlp.up_proj.weight"),
    }


_EXPERTS: Final = "model.layers.0.mlp.experts."
_ROUTER: Final = "model.layers.0.mlp.gate.weight"
EXPERT_FAULTS: Final[Mapping[str, Fault]] = {
    "two experts are swapped": swapped_blocks(f"{_EXPERTS}gate_up_proj", f"{_EXPERTS}down_proj"),
    "two experts are swapped in one tensor": swapped_blocks(f"{_EXPERTS}down_proj"),
    "the halves of all experts of a layer are swapped": swapped_blocks(f"{_EXPERTS}gate_up_proj", size=128, axis=1),
    "one expert of one layer is stale": stale_block(f"{_EXPERTS}gate_up_proj", f"{_EXPERTS}down_proj"),
    "the experts of one layer are stale": stale(_EXPERTS),
    "the experts of all layers are stale": stale(".experts."),
    "one router is stale": stale(_ROUTER),
    "two rows of a router are swapped": swapped_blocks(_ROUTER),
}
"""Faults in a tiny Qwen3 mixture of experts, with the tensor names of transformers 5."""


def stepped(tensors: Tensors, seed: int, size: float = STEP_RATIO) -> Tensors:
    """The tensors after a step in a random direction."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() * size
        for name, tensor in tensors.items()
    }


class Trial:
    """One engine, a trainer's model in float32, and proofs of several sizes."""

    def __init__(self, engine: Engine, model: Any, dtype: str, sizes: Sequence[int]) -> None:
        assert isinstance(engine, Controllable)
        self.engine, self.model, self.dtype, self.sizes = engine, model, dtype, sizes
        self.first = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        if not model.config.tie_word_embeddings:
            self.first["lm_head.weight"] = model.state_dict()["lm_head.weight"].clone()
        self.baselines: dict[int, ProofFigures] = {}
        self.accepted: dict[int, Accepted] = {}

    async def start(self) -> dict[int, ProofFigures]:
        """Measure the first weights, with which later weights are compared."""
        return {size: figures for size, (figures, _) in (await self.judged(self.proofs(self.first), keep=True)).items()}

    def proofs(self, tensors: Tensors) -> dict[int, WeightProof]:
        """Return proofs of these weights, by size."""
        self.model.load_state_dict(tensors, strict=False)
        tokenizer = self.engine.tokenizer
        return {size: weight_proof(self.model, tokenizer, size=size, dtype=self.dtype) for size in self.sizes}

    async def judged(
        self, proofs: Mapping[int, WeightProof], *, keep: bool = False
    ) -> dict[int, tuple[ProofFigures, str]]:
        """Return the figures of each proof, and the reason why it fails or "".

        Args: proofs: the proofs, by size. keep: True to compare later proofs with the proofs that hold here.
        """
        found, accepted = dict[int, tuple[ProofFigures, str]](), dict(self.accepted)
        for size, proof in proofs.items():
            scores = await self.engine.score(proof.ids)
            tolerance = tolerance_of(proof, self.dtype, self.baselines.get(size))
            before = self.accepted.get(size)
            figures = compare_scores(proof, scores, tolerance, before, engine_dtype=self.dtype)
            why = failure_reason(figures, proof, scores, before) or await self.why_in_steps(proof, tolerance)
            found[size] = figures, why
            if keep and not why:
                accepted[size] = Accepted(proof, scores)
                self.baselines.setdefault(size, figures)
        self.accepted = accepted
        return found

    async def why_in_steps(self, proof: WeightProof, tolerance: ProofTolerance) -> str:
        """Return the reason why scores of single steps differ from a proof, or ""."""
        sampling = Sampling(temperature=1.0)
        scores = await self.engine.score(proof.ids[: STEP_PLACES.stop], sampling=sampling)
        in_steps = scores[STEP_PLACES.start - 1 :]
        return compare_in_steps(proof, in_steps, tolerance.in_steps(), engine_dtype=self.dtype)[1]

    async def after(
        self, fault: Fault, right: Tensors, proofs: Mapping[int, WeightProof]
    ) -> dict[int, tuple[ProofFigures, str]]:
        """Load weights with a fault, and return the results of proofs of the right weights."""
        given = dict(right)
        fault(given, self.first)
        await self.engine.update_weights(given)
        return await self.judged(proofs)

    async def false_alarms(self, updates: int) -> dict[int, int]:
        """Return how many right updates the proofs refuse, by size. Each update is a small step from the last one."""
        alarms = dict.fromkeys(self.sizes, 0)
        tensors = self.first
        for number in range(updates):
            tensors = stepped(tensors, 100 + number, STEP_RATIO / 5)
            await self.engine.update_weights(tensors)
            for size, (_, why) in (await self.judged(self.proofs(tensors), keep=True)).items():
                alarms[size] += bool(why)
        return alarms
