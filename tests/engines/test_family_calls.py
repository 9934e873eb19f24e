"""Required calls in the formats of many families, sampled by the real engine: whatever it says, it can be read.

One small model serves all of them. Its vocabulary has the control tokens of every template, and it knows none of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from runner import Environment, Limits, Run, Sampling, Task, Turn, VllmEngine, reward, tool
from runner.engines.base import FinishReason
from runner.parsing.harmony import NEXT_MESSAGE
from runner.parsing.learnt import learnt_turn
from runner.parsing.parser import TurnParser
from runner.testing import assert_exact
from runner.tokens.template import ChatTemplate
from tests import sweeps
from tests.conformance.corpus import VARIABLES, control_tokens, corpus, is_special
from tests.parsing.test_family_episodes import TEMPLATES, ends

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart]

FAMILIES = {**TEMPLATES, "gpt-oss": "openai-gpt-oss-120b"}


def template_of(name: str) -> ChatTemplate:
    text = next(entry.text for entry in corpus() if entry.name == FAMILIES[name])
    return ChatTemplate(text, name=FAMILIES[name], variables=VARIABLES)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_of_all(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with the control tokens of every family, and random rows for them."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("polyglot")
    for path in small_model_folder.iterdir():
        shutil.copy(path, folder / path.name)
    names = dict.fromkeys(
        token for name in FAMILIES for token in control_tokens(template_of(name).renderer().written())
    )
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {**vocabulary["model"]["vocab"], **{token["content"]: token["id"] for token in vocabulary["added_tokens"]}}
    size = max(known.values()) + 1
    for name in names:
        if name not in known:
            token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            vocabulary["added_tokens"].append({"id": size, "content": name, "special": is_special(name), **token})
            size += 1
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    more = torch.randn(size - len(rows), rows.shape[1], generator=torch.Generator().manual_seed(0)) * rows.std()
    tensors["model.embed_tokens.weight"] = torch.cat([rows, more.to(rows.dtype)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
async def engine(model_of_all: Path, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    async with VllmEngine(model_of_all, template="pythonic", max_num_seqs=8, max_model_len=8192) as engine:
        yield engine


class Adder(Environment):
    """Requires a call, answers it, and requires another one."""

    def tasks(self) -> list[Task]:
        return [Task(f"sum {n}", prompt=f"What is {n} + {n}?") for n in range(2)]

    @tool(parallel=False)  # a model that does not know what it says would make calls until it is cut
    def add(self, a: Literal[1, 25, 300], b: Literal["one", 'two "or" more'], exact: bool = True) -> str:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
            exact: whether to the last digit.
        """
        return f"{a} + {b}"

    async def rollout(self, conversation: Any) -> None:
        for _ in range(2):
            turn = await conversation.generate(tool_choice="required")
            conversation.add(*await conversation.call_tools(turn))

    @reward
    def done(self) -> bool:
        return True


def ending_thoughts(parser: TurnParser, engine: VllmEngine) -> Sampling:
    """What makes a model that knows nothing end at once the thought that a prompt opens."""
    opened = parser.reasoning.opened_by_prompt
    closes = NEXT_MESSAGE if parser.format.harmony else parser.reasoning.close if opened else ""
    return Sampling(max_tokens=400, logit_bias=dict.fromkeys(engine.tokenizer.encode(closes)[:1], 100.0))


async def played(
    environment: type[Environment], name: str, engine: VllmEngine, sampling: Callable[[TurnParser], Sampling]
) -> list[Turn]:
    """The turns of a family's episodes, which are exact."""
    template = template_of(name)
    parser = TurnParser(learnt_turn(template.renderer()).format)
    stops = [engine.tokenizer.token_id(stop) for stop in ends(template.renderer())]
    # A grammar that is fulfilled leaves the vocabulary's own EOS, which is no token of most of these templates.
    known = [stop for stop in (*stops, engine.tokenizer.eos_id) if stop is not None]
    engine.template, engine.stop_ids = template, tuple(dict.fromkeys(known))
    turns: list[Turn] = []
    async with Run(environment, engine, sampling=sampling(parser), limits=Limits(turns=2), seed=3) as run:
        async for trajectory in run:
            assert not trajectory.outcome.failed, trajectory.error
            assert_exact(trajectory)
            turns += trajectory.turns
    return turns


def assert_called(turns: list[Turn]) -> None:
    assert turns
    for turn in turns:
        assert turn.tool_calls
        assert {(call.name, call.error) for call in turn.tool_calls} == {("add", None)}


@pytest.mark.parametrize("name", sweeps.part(list(FAMILIES), 6))
async def test_required_calls_of_a_family_are_read_without_an_error(name: str, engine: VllmEngine) -> None:
    turns = await played(Adder, name, engine, lambda parser: ending_thoughts(parser, engine))
    assert_called([turn for turn in turns if turn.finish is FinishReason.STOP])


class StrictAdder(Adder):
    """Leaves it to the model whether it calls."""

    @tool(parallel=False, strict=True)
    def add(self, a: Literal[1, 25, 300], b: Literal["one", 'two "or" more'], exact: bool = True) -> str:
        """Add two numbers."""
        return super().add(a, b, exact)

    async def rollout(self, conversation: Any) -> None:
        await conversation.generate()


BY_THEMSELVES = ["Mistral 7B", "Kimi K2", "Gemma 4", "Hunyuan", "Qwen3", "LFM 2.5"]
"""Families whose calls a control token announces, and whose prompts end in no thought."""


@pytest.mark.parametrize("name", sweeps.part(BY_THEMSELVES, 6))
async def test_a_strict_call_that_a_model_begins_by_itself_is_read_without_an_error(
    name: str, engine: VllmEngine
) -> None:
    def calling(parser: TurnParser) -> Sampling:
        assert parser.format.calls is not None
        (trigger,) = engine.tokenizer.encode(parser.format.calls.trigger)
        return Sampling(max_tokens=100, logit_bias={trigger: 100.0})

    assert_called(await played(StrictAdder, name, engine, calling))
