"""The wire format is vLLM's: requests and the stand-in's answers validate with vLLM's own models.

SGLang's format is compared only with its source, since it cannot be installed beside vLLM.
"""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from runner.engines.remote.dialect import ServerDialect
from runner.options import Constraint, ConstraintKind
from tests.engines.remote.remote_requests import asked, read, wanted

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart]

EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {65: 1.5},
    "bad_words": ("no",),
    "logprobs": 3,
    "stop_ids": (257, 66),
    "seed": 7,
}
CONSTRAINTS = [
    Constraint(ConstraintKind.JSON, '{"type": "object"}'),
    Constraint(ConstraintKind.REGEX, "[a-z]+"),
    Constraint(ConstraintKind.GRAMMAR, 'root ::= "a" | "b"'),
    Constraint(ConstraintKind.CHOICE, '["a", "b"]'),
]


def of_vllm(module: str, name: str) -> Any:
    """Return a model of vLLM's entry points."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries
        return getattr(importlib.import_module(f"vllm.entrypoints.{module}"), name)


async def spoken(folder: Path, dialect: ServerDialect, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a request, and the chunks of its answer."""
    async with asked(folder, dialect=dialect) as (server, engine):
        await read(engine, wanted(40, **options))
        return server.bodies[0], server.chunks


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=[each.kind.value for each in CONSTRAINTS])
async def test_a_request_for_ids_means_to_vllm_what_was_asked(tmp_path: Path, constraint: Constraint) -> None:
    generate_request = of_vllm("scale_out.token_in_token_out.protocol", "GenerateRequest")

    body, _ = await spoken(tmp_path, ServerDialect.VLLM, **EVERYTHING, constraint=constraint)
    request = generate_request.model_validate(body)
    assert (request.token_ids, request.stream, request.model) == ([72, 105], True, "scripted")
    assert set(body["sampling_params"]) <= {*type(request.sampling_params).__struct_fields__}
    # One id more, since vLLM counts the sampled id.
    expected = {**EVERYTHING, "logprobs": 4, "bad_words": ["no"]}
    for name in expected.keys() - {"stop_ids", "seed"}:
        assert getattr(request.sampling_params, name) == expected[name], name
    assert request.sampling_params.stop_token_ids == [257, 66]
    assert (request.sampling_params.seed, request.sampling_params.ignore_eos) == (7, True)
    structured = request.sampling_params.structured_outputs
    value = json.loads(constraint.value) if constraint.kind is ConstraintKind.CHOICE else constraint.value
    assert getattr(structured, constraint.kind.value) == value


async def test_a_completion_with_ids_means_to_vllm_what_was_asked(tmp_path: Path) -> None:
    completion_request = of_vllm("openai.completion.protocol", "CompletionRequest")

    body, _ = await spoken(tmp_path, ServerDialect.COMPLETIONS, **EVERYTHING, constraint=CONSTRAINTS[0])
    request = completion_request.model_validate(body)
    assert not request.model_extra, "a field that vLLM does not have"
    assert (request.prompt, request.return_token_ids, request.logprobs) == ([72, 105], True, 3)
    parameters = request.to_sampling_params(40, {})
    assert (parameters.temperature, parameters.top_k, parameters.min_tokens) == (0.7, 5, 2)
    assert (parameters.stop_token_ids, parameters.seed, parameters.ignore_eos) == ([257, 66], 7, True)
    assert parameters.structured_outputs.json == '{"type": "object"}'


@pytest.mark.parametrize("count", [0, 3])
async def test_answers_of_the_stand_in_fit_the_response_models_of_vllm(tmp_path: Path, count: int) -> None:
    completion_chunk = of_vllm("openai.completion.protocol", "CompletionStreamResponse")
    tokens_chunk = of_vllm("scale_out.token_in_token_out.protocol", "GenerateTokensStreamResponse")

    _, chunks = await spoken(tmp_path, ServerDialect.VLLM, logprobs=count)
    for chunk in chunks:
        said = tokens_chunk.model_validate(chunk)
        assert chunk.keys() <= type(said).model_fields.keys()
        assert all(choice.keys() <= type(said.choices[0]).model_fields.keys() for choice in chunk["choices"])
    _, chunks = await spoken(tmp_path / "completions", ServerDialect.COMPLETIONS, logprobs=count)
    for chunk in chunks:
        assert not completion_chunk.model_validate(chunk).model_extra
