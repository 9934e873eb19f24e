"""Random generators that vLLM can rewind: its call after each chunk of a prompt, and the ids sampled after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner.engines.vllm.start import contained_vllm
from runner.engines.vllm.worker.cpu_patches import patch_generators, rewinding

torch = pytest.importorskip("torch")


def numbers(generator: Any) -> list[float]:
    values: list[float] = torch.empty(8).exponential_(generator=generator).tolist()
    return values


def take_back(generator: Any) -> None:
    generator.set_offset(generator.get_offset() - 4)  # as vLLM's model runner does


def plain(seed: int) -> Any:
    return torch.Generator(device="cpu").manual_seed(seed)


@pytest.mark.engine
def test_unpatched_runner_cannot_reset_a_generator_of_a_cpu() -> None:
    pytest.importorskip("vllm")
    with contained_vllm():
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(
        use_async_scheduling=True,
        input_batch=SimpleNamespace(num_reqs=1, generators={0: plain(7)}),
        discard_request_mask=SimpleNamespace(np=np.array([True])),
    )
    # If this is another error or none, vLLM may have fixed it: remove the patch.
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        GPUModelRunner._bookkeeping_sync(runner, None, None, None, None, 1)


def test_numbers_of_a_discarded_sample_are_drawn_again() -> None:
    generator = rewinding(7, [])
    first = numbers(generator)
    for _ in range(3):
        take_back(generator)
        assert numbers(generator) == first == numbers(plain(7))


def test_recomputed_turn_does_not_repeat_its_random_numbers() -> None:
    sampled: list[int] = []
    generator = rewinding(7, sampled)
    first = numbers(generator)
    sampled.append(1)
    take_back(generator)
    assert numbers(generator) != first


def test_vllm_requests_get_rewindable_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    states = pytest.importorskip("vllm.v1.worker.gpu_input_batch")
    monkeypatch.setattr(states.CachedRequestState, "__post_init__", states.CachedRequestState.__post_init__)
    patch_generators()
    once = states.CachedRequestState.__post_init__
    patch_generators()
    assert states.CachedRequestState.__post_init__ is once

    def made(generator: Any) -> Any:
        return states.CachedRequestState(
            req_id="a",
            prompt_token_ids=[1, 2],
            mm_features=[],
            sampling_params=None,
            generator=generator,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=[],
        )

    assert made(None).generator is None
    state = made(plain(7))
    assert state.num_prompt_tokens == 2
    assert state.generator.sampled is state.output_token_ids
    assert numbers(state.generator) == numbers(plain(7))
    take_back(state.generator)
    assert numbers(state.generator) == numbers(plain(7))
