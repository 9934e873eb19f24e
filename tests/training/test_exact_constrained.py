"""Exact constrained turns on the real engine: a trainer's log-probabilities under the masks equal the recorded ones.

The engine computes in float32, so that its log-probabilities can be compared with Hugging Face's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from envs.calculator import Calculator
from runner import Conversation, Environment, FinishReason, Limits, Sampling, Task, Trajectory, reward
from runner.engines.base import Engine, GenerationRequest
from runner.errors import RequestRejected, unwrapped
from runner.options import Constraint, ConstraintKind
from runner.parsing.call_grammar import constraint as constraint_of_calls
from runner.parsing.turn_format import ReasoningFormat
from runner.testing import play, play_many
from runner.tools.tool import Tool
from runner.training.batch import TrainingBatch
from runner.training.grammar import GrammarMasks
from runner.training.token_masks import UNCONSTRAINED_INDEX, TokenMasks
from tests import sweeps
from tests.parsing.learnt_formats import CLASSES, learnt
from tests.parsing.parsers import bundled
from tests.repository import DOCS
from tests.training.making import made, prompt, said

pytestmark = pytest.mark.engine

TOLERANCE_NATS = 1e-3
STOP, END_OF_TEXT, REPO_NAME = 2, 0, 3

PAGE = DOCS / "constrained-training.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page on constrained turns defines."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


Compare = Callable[[Sequence[Trajectory]], "Difference"]


@dataclass(frozen=True)
class Difference:
    """A trainer's log-probabilities minus the engine's, in nats, for every trained id of some trajectories."""

    masked: Any
    """The difference under the masks, shape [trained]."""
    unmasked: Any
    """The difference without the masks, shape [trained]."""
    masks: TokenMasks
    """The masks of the same positions."""
    recorded: Any
    """The engine's log-probabilities."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.masked).max())


@pytest.fixture
def compare(page: dict[str, Any], hugging_face_model: Any, float32_engine: Any) -> Compare:
    """Run a trainer's steps from trajectories to log-probabilities, as on the page."""
    import torch

    grammar = GrammarMasks.of_engine(float32_engine)

    def difference(trajectories: Sequence[Trajectory]) -> Difference:
        batch = TrainingBatch.padded(trajectories, pad_id=END_OF_TEXT)
        masks = grammar.masks_for(batch.rows, batch.layout)
        none = replace(masks, index=np.full_like(masks.index, UNCONSTRAINED_INDEX))
        of_page = page["masks_of"](batch)
        assert np.array_equal(of_page.table, masks.table)
        assert np.array_equal(of_page.index, masks.index)
        with torch.inference_mode():
            trained = partial(page["trained_logprobs"], hugging_face_model, batch)
            ours, plain = trained(masks).numpy(), trained(none).numpy()
        recorded = batch.logprobs[batch.loss_mask]
        return Difference(ours - recorded, plain - recorded, masks.take(batch.loss_mask), recorded)

    return difference


def assert_exact_under_masks(found: Difference) -> None:
    """Assert that every sampled position is exact under the masks, and not exact without them."""
    assert len(found.masked) > 0
    assert found.largest < TOLERANCE_NATS
    constrained = found.masks.index != UNCONSTRAINED_INDEX
    assert constrained.any()
    assert (found.recorded[found.masks.forced] == 0).all()
    assert np.abs(found.unmasked[constrained]).max() > 100 * TOLERANCE_NATS
    assert np.abs(found.unmasked[~constrained]).max(initial=0) < TOLERANCE_NATS


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_calculator_logprobs_equal_the_trainers(float32_engine: Any, compare: Compare, temperature: float) -> None:
    episodes = play_many(
        Calculator(examples=1),
        float32_engine,
        tasks=3,
        sampling=Sampling(temperature=temperature),
        limits=Limits(turns=3),
    )
    assert all(episode.outcome.scored for episode in episodes)
    assert max(len(episode.turns) for episode in episodes) > 1
    assert all(turn.constraint is not None for episode in episodes for turn in episode.turns)
    found = compare(episodes)
    print(f"\ncalculator at {temperature}: {len(found.masked)} ids, {found.largest:.1e} nats")
    assert_exact_under_masks(found)
    assert found.masks.forced.mean() > 0.1


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
}


class Forms(Environment):
    """Environment with a conversation whose turns are constrained in every way that authors can choose, or free."""

    turns = (
        Sampling(schema=PERSON),
        Sampling(max_tokens=12),
        Sampling(regex=r"(Yes|No), because [a-z ]{5,40}\.", stop_ids=(END_OF_TEXT,)),
        Sampling(choice=('the "first" one', "the second one", "neither of them")),
        Sampling(regex=r"[0-9]{3}-[0-9]{4}", temperature=0.0),
        Sampling(schema=PERSON, max_tokens=5),
        Sampling(schema=PERSON, temperature=1.3),
    )

    def tasks(self) -> list[Task]:
        return [Task(id="forms", prompt="Tell me of an animal.")]

    async def rollout(self, conversation: Conversation) -> None:
        for number, sampling in enumerate(self.turns):
            turn = await conversation.generate(sampling=sampling)
            if turn.finish is FinishReason.STOP:  # otherwise the next turn continues this truncated one
                conversation.add(f"And another, number {number}.")

    @reward
    def done(self) -> bool:
        return len(self.episode.turns) == len(self.turns)


def test_turns_of_every_form_in_one_conversation_have_equal_logprobs(float32_engine: Any, compare: Compare) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=40)
    episodes = [play(Forms, float32_engine, sampling=sampling, seed=seed) for seed in range(sweeps.times(2, 1))]
    for episode in episodes:
        assert (episode.outcome.scored, episode.reward) == (True, 1)
        kinds = [turn.constraint.kind if turn.constraint is not None else None for turn in episode.turns]
        assert kinds == ["grammar", None, "regex", "choice", "regex", "grammar", "grammar"]
        assert episode.turns[-1].start == episode.turns[-2].end  # it continued that turn, with its own grammar
    found = compare(episodes)
    print(f"\nforms: {len(found.masked)} ids, {found.largest:.1e} nats")
    assert_exact_under_masks(found)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TAG = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</n>"}
TAGS = {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG], "at_least_one": True, "stop_after_first": True}


def written() -> dict[str, Constraint]:
    """Return a constraint that is not from a field of `Sampling`."""
    hermes = bundled("hermes").constraint([Tool(add)], "required")
    form = learnt(CLASSES["raw strings"])
    assert hermes is not None
    assert form is not None
    calls = {
        "learnt": constraint_of_calls(form, [Tool(add)], "required"),
        "learnt, after a thought": constraint_of_calls(
            form, [Tool(add)], "required", thought=ReasoningFormat("", ".", opened_by_prompt=True)
        ),
        "learnt, free text": constraint_of_calls(form, [Tool(add)], "auto"),
    }
    tag = json.dumps({"type": "structural_tag", "format": TAGS})
    return {
        "hermes": hermes,
        "ebnf": Constraint(ConstraintKind.GRAMMAR, 'root ::= [A-Z] [a-z]* (" " [a-z]+){2,6} "."'),
        "lark": Constraint(ConstraintKind.GRAMMAR, 'start: ("yes" | "no" | "maybe") ", " /[a-z]{3,8}/'),
        "structural_tag": Constraint(ConstraintKind.STRUCTURAL_TAG, tag),
        **{name: enforced for name, enforced in calls.items() if enforced is not None},
    }


async def generated(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Trajectory]:
    """Return each request's turn as a trajectory. All requests run in one batch of the engine."""
    trajectories: dict[str, Trajectory] = {}

    async def sample(request: GenerationRequest) -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        async with engine.stream(request) as stream:
            async for delta in stream:
                ids.extend(delta.token_ids)
                logprobs.extend(delta.logprobs or ())
        trajectory = made([prompt(*request.prompt), said(*ids, logprobs=logprobs)], sampling=request.sampling)
        trajectory.turns[0].constraint = request.constraint
        trajectories[request.name] = trajectory

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(sample, request)
    return [replace(trajectories[request.name], id=f"{request.name}#0") for request in requests]


def asked(engine: Any, name: str, constraint: Constraint, sampling: Sampling, **fields: Any) -> GenerationRequest:
    question = engine.tokenizer.encode("<|im_start|>user\nWhat is 2 and 3?<|im_end|>\n<|im_start|>assistant\n")
    settings = replace(sampling.over(Sampling.defaults()), max_tokens=40)
    return GenerationRequest(name=name, prompt=question, sampling=settings, constraint=constraint, **fields)


@pytest.mark.whole
def test_grammar_logprobs_equal_the_trainers_in_any_batch(float32_engine: Any, compare: Compare) -> None:
    requests = [
        asked(
            float32_engine,
            f"{name} {temperature}",
            constraint,
            Sampling(temperature=temperature),
            stop_ids=(STOP,),
            seed=7,
        )
        for name, constraint in written().items()
        for temperature in (0.0, 0.7, 1.0)
    ]
    found = compare(float32_engine.home.call(generated, float32_engine, requests))
    print(f"\ngrammars: {len(found.masked)} ids, {found.largest:.1e} nats")
    assert_exact_under_masks(found)


def test_an_end_that_ends_nothing_frees_the_rest_of_the_turn(float32_engine: Any, compare: Compare) -> None:
    """The model samples its own end, although only another id ends the turn."""
    constraint = Constraint(ConstraintKind.CHOICE, '["It is 5.", "It is 6."]')
    sampling = Sampling(stop_ids=(REPO_NAME,))
    requests = [asked(float32_engine, f"go on {seed}", constraint, sampling, seed=seed) for seed in range(2)]
    turns = float32_engine.home.call(generated, float32_engine, requests)
    assert any(STOP in trajectory.turns[0].token_ids[:-1] for trajectory in turns)
    found = compare(turns)
    assert (found.masks.index == UNCONSTRAINED_INDEX).any()
    assert_exact_under_masks(found)


def test_unsupported_grammar_is_refused_without_a_fallback(float32_engine: Any) -> None:
    schema = json.dumps({"type": "integer", "multipleOf": 7})
    request = asked(float32_engine, "multiple", Constraint(ConstraintKind.JSON, schema), Sampling())
    with pytest.raises(ExceptionGroup) as refused:
        float32_engine.home.call(generated, float32_engine, [request])
    error = unwrapped(refused.value)
    assert isinstance(error, RequestRejected)
    assert "not supported by xgrammar" in str(error)
