"""Which planted faults proofs of weights find, and how many right updates they refuse.

`python -m tests.benchmarks.proof_power [UPDATES] [DTYPE ...]`

The engine gets weights with a fault, and the proof is of the right ones: after each of thirty faults the engine scores
three proofs of different sizes. Then come right updates, by default 200. Both in float32 and bfloat16.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anyio

from runner import VllmEngine, WeightProof
from runner.engines.proofs import Accepted, ProofFigures, compare_scores, failure_reason, tolerance_of
from runner.models import demo_model
from runner.training import weight_proof

SIZES = (64, 256, 1024)
STEP = 0.01
"""The change of an optimizer's step, in standard deviations of each tensor."""
Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Plants a fault in new tensors, given the old ones."""

LAYER = "model.layers.7."
KINDS = (
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
HEAD = 64  # the size of an attention head of the demo model


def stale(part: str) -> Change:
    """Every tensor whose name holds `part` keeps its old values."""

    def change(new: dict[str, Any], old: dict[str, Any]) -> None:
        new.update({name: old[name].clone() for name in new if part in name})

    return change


def scaled(name: str, factor: float) -> Change:
    return lambda new, old: new.update({name: new[name] * factor})


def swapped(name: str, other: str) -> Change:
    return lambda new, old: new.update({name: new[other].clone(), other: new[name].clone()})


def rolled(name: str, rows: int) -> Change:
    """The first two blocks of so many rows trade places."""

    def change(new: dict[str, Any], old: dict[str, Any]) -> None:
        new[name] = new[name].clone()
        new[name][: 2 * rows] = new[name][: 2 * rows].roll(rows, 0)

    return change


def half(name: str) -> Change:
    """The second half of the rows keeps its old values, as of a tensor that came by half."""

    def change(new: dict[str, Any], old: dict[str, Any]) -> None:
        new[name] = new[name].clone()
        new[name][len(new[name]) // 2 :] = old[name][len(new[name]) // 2 :]

    return change


def faults() -> dict[str, Change]:
    """Thirty faults, by their names."""
    found: dict[str, Change] = {"every tensor is stale": stale("")}
    found |= {f"{kind} is stale in one layer": stale(f"{LAYER}{kind}.") for kind in KINDS}
    found |= {f"{kind} is stale in all layers": stale(f".{kind}.") for kind in KINDS}
    found |= {
        "the embedding is stale": stale("embed_tokens"),
        "the last norm is stale": stale("model.norm."),
        "one layer is stale": stale(LAYER),
        "the upper half of the layers is stale": lambda new, old: new.update(
            {name: old[name] for name in new if "layers." in name and int(name.split(".")[2]) >= 15}
        ),
        "one tensor is 1% too large": scaled(f"{LAYER}mlp.down_proj.weight", 1.01),
        "one tensor is 10% too large": scaled(f"{LAYER}mlp.down_proj.weight", 1.1),
        "two heads are swapped": rolled(f"{LAYER}self_attn.q_proj.weight", HEAD),
        "two heads of keys are swapped": rolled(f"{LAYER}self_attn.k_proj.weight", HEAD),
        "the halves of a fused projection are swapped": swapped(
            f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
        ),
        "two layers are swapped in one tensor": swapped(
            f"{LAYER}self_attn.o_proj.weight", "model.layers.8.self_attn.o_proj.weight"
        ),
        "a tensor came by half": half(f"{LAYER}mlp.up_proj.weight"),
    }
    return found


def stepped(tensors: dict[str, Any], seed: int, size: float = STEP) -> dict[str, Any]:
    """The tensors after a step in a random direction."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() * size
        for name, tensor in tensors.items()
    }


class Trial:
    """One engine, a trainer's model, and the proofs of different sizes."""

    def __init__(self, engine: VllmEngine, model: Any, dtype: str) -> None:
        self.engine, self.model, self.dtype = engine, model, dtype
        self.baselines: dict[int, ProofFigures] = {}
        self.accepted: dict[int, Accepted] = {}
        self._last: dict[int, Accepted] = {}

    def proofs(self, tensors: dict[str, Any]) -> dict[int, WeightProof]:
        self.model.load_state_dict(tensors, strict=False)
        return {size: weight_proof(self.model, self.engine.tokenizer, size=size, dtype=self.dtype) for size in SIZES}

    async def judged(
        self, proofs: dict[int, WeightProof], *, first: bool = False
    ) -> dict[int, tuple[ProofFigures, str]]:
        """The figures of each proof and why it fails; a right one is what later ones are compared with."""
        judged = {}
        for size, proof in proofs.items():
            scores = await self.engine.score(proof.ids)
            tolerance = tolerance_of(proof, self.dtype, self.baselines.get(size))
            before = self.accepted.get(size)
            figures = compare_scores(proof, scores, tolerance, before, engine_dtype=self.dtype)
            judged[size] = figures, failure_reason(figures, proof, scores, before)
            if first:
                self.baselines[size] = figures
            if first or not judged[size][1]:
                self._last[size] = Accepted(proof, scores)
        return judged

    def keep(self) -> None:
        self.accepted = dict(self._last)


async def measure(dtype: str, updates: int) -> Iterator[str]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    lines = [f"{dtype}"]
    async with VllmEngine("smollm2-135m", dtype=dtype, max_model_len=2048) as engine:
        trial = Trial(engine, copy.deepcopy(model), dtype)
        first = await trial.judged(trial.proofs(old), first=True)
        trial.keep()
        lines += [f"  first weights, {size} ids: {figures}" for size, (figures, _) in first.items()]
        found = dict.fromkeys(SIZES, 0)
        new = stepped(old, 1)
        proofs = trial.proofs(new)
        for name, change in faults().items():
            given = dict(new)
            change(given, old)
            await engine.update_weights(given)
            judged = await trial.judged(proofs)
            for size, (_, why) in judged.items():
                found[size] += bool(why)
            marks = " ".join("found" if judged[size][1] else "-----" for size in SIZES)
            figures = judged[256][0]
            lines.append(f"  {marks}  {name} (median {figures.median:.2g}, arrived {figures.arrived})")
            print(lines[-1], file=sys.stderr, flush=True)
        lines += [f"  of {len(faults())} faults found with {size} ids: {count}" for size, count in found.items()]
        alarms = dict.fromkeys(SIZES, 0)
        tensors = old
        for number in range(updates):
            tensors = stepped(tensors, 100 + number, STEP / 5)
            await engine.update_weights(tensors)
            for size, (figures, why) in (await trial.judged(trial.proofs(tensors))).items():
                alarms[size] += bool(why)
                if why:
                    print(number, size, figures, why, file=sys.stderr, flush=True)
            trial.keep()
        lines += [
            f"  false alarms of {updates} right updates with {size} ids: {count}" for size, count in alarms.items()
        ]
    return iter(lines)


async def main(updates: int, dtypes: list[str]) -> None:
    for dtype in dtypes or ("float32", "bfloat16"):
        print("\n".join(await measure(dtype, updates)), flush=True)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 200, sys.argv[2:])
