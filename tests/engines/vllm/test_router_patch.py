"""Routers of experts on CPUs: a bias on the scores chooses the experts, as in transformers."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engines.vllm.worker.cpu_patches import patch_routers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch during the import of vLLM

IDS, EXPERTS, CHOSEN = 50, 8, 2


@pytest.fixture
def router_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    monkeypatch.setattr(CPURouter, "_compute_routing", CPURouter._compute_routing)
    return CPURouter


def weights_of_experts(weights: Any, chosen: Any) -> Any:
    """Weight of each expert, of shape [ids, experts]; 0 for experts that are not chosen."""
    return torch.zeros(IDS, EXPERTS).scatter(1, chosen.long(), weights.float())


def difference(router_class: Any, *, bias: float) -> float:
    """Largest difference of a weight from transformers' router of Ernie 4.5."""
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    torch.manual_seed(0)
    config = transformers.Ernie4_5_MoeConfig(hidden_size=16, moe_num_experts=EXPERTS, moe_k=CHOSEN)
    reference = Ernie4_5_MoeTopKRouter(config)
    with torch.no_grad():
        reference.weight.normal_()
        reference.moe_statics.e_score_correction_bias.normal_().mul_(bias)
        states = torch.randn(IDS, 16)
        logits, weights, chosen = reference(states)
    corrections = reference.moe_statics.e_score_correction_bias[0] if bias else None
    router = router_class(CHOSEN, EXPERTS, e_score_correction_bias=corrections)
    given = weights_of_experts(*router._compute_routing(states, logits, None))
    return float((given - weights_of_experts(weights, chosen)).abs().max())


def test_unpatched_router_ignores_the_bias(router_class: Any) -> None:
    assert difference(router_class, bias=0.0) < 1e-5
    assert difference(router_class, bias=1.0) > 0.1, "vLLM has fixed it: remove the patch"


@pytest.mark.parametrize("bias", [0.0, 0.01, 1.0])
def test_patched_router_chooses_by_the_bias(router_class: Any, bias: float) -> None:
    patch_routers()
    patch_routers()
    assert difference(router_class, bias=bias) < 1e-5
