"""Rotary embeddings on CPUs: the kernel agrees with vLLM's own computation in torch, for queries of any shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner.engines.vllm.worker.cpu_patches import patch_rotary_embeddings

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch during the import of vLLM

IDS, HEADS, SIZE = 7, 4, 64


@pytest.fixture
def embedding_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    monkeypatch.setenv("LD_PRELOAD", "")  # the configuration adds to it for all processes that start later
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding


def difference(embedding_class: Any, *, neox: bool, flat: bool) -> float:
    """Largest difference between the kernel and torch, over query and key."""
    torch.manual_seed(0)
    rotary = embedding_class(SIZE, SIZE, 512, 10000.0, neox, torch.float32)
    query, key = torch.randn(IDS, HEADS, SIZE), torch.randn(IDS, 1, SIZE)
    if flat:
        query, key = query.flatten(1), key.flatten(1)
    positions = torch.arange(IDS)
    wanted = rotary.forward_native(positions, query.clone(), key.clone())
    given = rotary.forward_cpu(positions, query.clone(), key.clone())
    return max(float((one - other).abs().max()) for one, other in zip(wanted, given, strict=True))


def test_unpatched_kernel_rotates_queries_of_heads_wrongly(embedding_class: Any) -> None:
    assert difference(embedding_class, neox=False, flat=True) < 1e-5
    assert difference(embedding_class, neox=False, flat=False) > 0.1, "vLLM has fixed it: remove the patch"


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_patched_kernel_rotates_every_shape_rightly(embedding_class: Any, neox: bool, flat: bool) -> None:
    patch_rotary_embeddings()
    patch_rotary_embeddings()
    assert difference(embedding_class, neox=neox, flat=flat) < 1e-5


def test_patched_kernel_takes_a_query_without_a_key(embedding_class: Any) -> None:
    patch_rotary_embeddings()
    rotary = embedding_class(SIZE, SIZE, 512, 10000.0, False, torch.float32)
    query = torch.randn(IDS, HEADS, SIZE)
    rotated, key = rotary.forward_cpu(torch.arange(IDS), query.clone())
    assert key is None
    assert torch.allclose(rotated, rotary.forward_native(torch.arange(IDS), query.clone())[0], atol=1e-5)
