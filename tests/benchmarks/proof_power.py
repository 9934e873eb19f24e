"""Planted faults that weight proofs detect, and correct updates that they refuse.

`python -m tests.benchmarks.proof_power [--model demo] [--dtype float32] [--updates 200]`

First, the engine gets weights with a fault, and proofs of the correct weights. Then it gets correct updates. `--model`
is the demo model (`demo`), its lowest layers (`small`) or a tiny mixture of experts (`experts`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from runner import VllmEngine
from runner.models import demo_model
from runner.training.tiny_model import save_tiny_model
from tests.engines.planted_faults import EXPERT_FAULTS, Trial, faults, stepped
from tests.engines.small_model import small_model

SIZES = (64, 256, 1024)


def load(name: str, folder: Path) -> tuple[Path, Any]:
    """The folder of the model, and the model in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

    demo = demo_model()
    if name == "experts":
        config = Qwen3MoeConfig(num_experts=8, architectures=["Qwen3MoeForCausalLM"])
        config.save_pretrained(folder / "config")
        vocabulary = AutoConfig.from_pretrained(demo).vocab_size
        start = folder / "start"
        return start, save_tiny_model(folder / "config", start, tokenizer=demo, vocabulary=vocabulary)
    start = demo if name == "demo" else small_model(folder, demo)
    return start, AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)


async def measure(name: str, dtype: str, updates: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        start, model = load(name, Path(folder))
        planted = EXPERT_FAULTS if name == "experts" else faults(model.config)
        async with VllmEngine(start, template="hermes", dtype=dtype, max_model_len=2048) as engine:
            trial = Trial(engine, model, dtype, SIZES)
            lines = [f"{name}, {dtype}"]
            lines += [f"  first weights, {size} ids: {figures}" for size, figures in (await trial.start()).items()]
            right = stepped(trial.first, 1)
            proofs = trial.proofs(right)
            found = dict.fromkeys(SIZES, 0)
            for number, (fault, plant) in enumerate(planted.items(), 1):
                judged = await trial.after(plant, right, proofs)
                for size, (_, why) in judged.items():
                    found[size] += bool(why)
                marks = " ".join("found" if judged[size][1] else "-----" for size in SIZES)
                figures = judged[256][0]
                lines.append(f"  {marks}  {fault} (median {figures.median:.2g}, arrived {figures.arrived})")
                print(number, lines[-1], file=sys.stderr, flush=True)
            lines += [f"  of {len(planted)} faults found with {size} ids: {count}" for size, count in found.items()]
            alarms = await trial.false_alarms(updates)
    lines += [f"  false alarms of {updates} right updates with {size} ids: {count}" for size, count in alarms.items()]
    return iter(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.proof_power", description=__doc__)
    parser.add_argument("--model", choices=("demo", "small", "experts"), default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--updates", type=int, default=200)
    given = parser.parse_args()
    print("\n".join(anyio.run(measure, given.model, given.dtype, given.updates)), flush=True)


if __name__ == "__main__":
    main()
