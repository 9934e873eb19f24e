"""Token masks on CPUs: every id of a vocabulary can be allowed, for vocabularies of any size."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engines.vllm.worker.cpu_patches import patch_bitmasks

torch = pytest.importorskip("torch")
xgrammar = pytest.importorskip("xgrammar")

SIZES = (1, 31, 32, 33, 64, 70, 49_302)
TURN_COUNT = 3


def masked(apply: Any, size: int, forbidden: set[int], indices: list[int] | None = None) -> tuple[Any, Any]:
    """Return the logits of `TURN_COUNT` turns, zero for each allowed id, and the memory that follows them."""
    words = (size + 31) // 32
    memory = torch.zeros(TURN_COUNT * size + 64)
    logits = memory[: TURN_COUNT * size].view(TURN_COUNT, size)
    bits = torch.tensor(
        [[token_id not in forbidden and token_id < size for token_id in range(words * 32)]] * TURN_COUNT
    )
    powers = 2 ** torch.arange(32)
    mask = (bits.view(TURN_COUNT, words, 32) * powers).sum(-1)
    apply(logits, torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32), indices=indices)
    return logits, memory[TURN_COUNT * size :]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(xgrammar, "apply_token_bitmask_inplace", xgrammar.apply_token_bitmask_inplace)
    patch_bitmasks()
    return xgrammar.apply_token_bitmask_inplace


def test_unpatched_kernel_writes_past_the_vocabulary() -> None:
    _, after = masked(xgrammar.apply_token_bitmask_inplace, 70, set())
    assert after.any(), "it is fixed upstream: remove our patch"


@pytest.mark.parametrize("indices", [None, [1]], ids=["all turns", "one turn"])
@pytest.mark.parametrize("size", SIZES)
def test_exactly_the_forbidden_ids_are_masked(patched: Any, size: int, indices: list[int] | None) -> None:
    for forbidden in (set(), {0}, {size - 1}, {0, size // 2}, set(range(size))):
        logits, after = masked(patched, size, forbidden, indices)
        assert not after.any()
        for turn in range(TURN_COUNT):
            found = {at for at, value in enumerate(logits[turn].tolist()) if value != 0}
            assert found == (forbidden if indices is None or turn in indices else set())


def test_second_bitmask_patch_changes_nothing(patched: Any) -> None:
    patch_bitmasks()
    assert xgrammar.apply_token_bitmask_inplace is patched
