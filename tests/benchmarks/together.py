"""`Run` compared with direct `AsyncLLM` if the turns of many episodes end together, with a scripted engine core.

The core shares this process's event loop, so its steps wait while prompts are built. vLLM's core has a process of its
own, so the ratio is higher there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from runner import VllmEngine
from runner.cli.quiet_output import quiet_output
from runner.models import load_language, resolve_model
from runner.runs.event_loop import on_event_loop
from tests.benchmarks.figures import Figure, main
from tests.benchmarks.parity import WORDS, Work, rounds
from tests.benchmarks.turn_cost import MODEL, scripted_llm

WIDTHS = (64, 512)
TURN_COUNT = 3
TURN_TOKENS = 128
ROUND_COUNT = 2
STEP_SECONDS = 0.05


def measure() -> Iterator[Figure]:
    """Ids a second through `Run`, divided by ids a second directly through `AsyncLLM`, by the number of episodes."""
    with TemporaryDirectory() as folder, quiet_output(Path(folder) / "vllm.log"):
        ratios = on_event_loop(_ratios)
    for width, values in ratios.items():
        name = f"Run / AsyncLLM, {width} episodes of {TURN_COUNT} turns of {TURN_TOKENS} ids that end together"
        yield Figure(name, "", values, at_least=0.95)


async def _ratios() -> dict[int, tuple[float, ...]]:
    model = resolve_model(MODEL)
    tokenizer, _, stop_ids = load_language(model, None)
    reply = [*tokenizer.encode(WORDS * 2)[: TURN_TOKENS - 1], stop_ids[0]]
    llm = scripted_llm(str(model.folder), reply, max(WIDTHS), STEP_SECONDS)
    try:
        async with VllmEngine.over(llm, model=MODEL, places=max(WIDTHS)) as engine:
            found = {}
            for width in WIDTHS:
                ours, raw = await rounds(engine, Work(width, TURN_COUNT, TURN_TOKENS, ROUND_COUNT))
                found[width] = tuple(one / other for one, other in zip(ours, raw, strict=True))
            return found
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main(measure)
