"""Turns that are sampled during an update of `check_weights`: ids of each version were sampled with its weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, DeltaStream, Finish, FinishReason, GenerationRequest
from runner.tokens.log import VersionSpan
from runner.training import TensorVerdict, Way
from tests.training.test_weight_check import TorchEngine, check_with, small_llama

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

__all__ = ["small_llama"]  # a fixture


class TorchTurns(TorchEngine):
    """Engine that samples its turns from the torch model that it loaded."""

    late_versions = 0
    """Number of ids that the new weights sampled, but that have the old version."""
    stale_turns = False
    """True for an engine whose open turns continue with the first weights."""

    def stream(self, request: GenerationRequest) -> Any:
        return _Stream(self, request)


class _Stream(DeltaStream):
    def __init__(self, engine: TorchTurns, request: GenerationRequest) -> None:
        self.rest, self.finish = [], None
        self._engine, self._ids, self._left = engine, list(request.prompt), request.sampling.max_tokens or 0
        self._random = random.Random(request.name)
        self._versions: list[str] = []

    async def __anext__(self) -> Delta:
        await checkpoint()
        if not self._left:
            self.finish = Finish(FinishReason.LENGTH, versions=self._spans())
            raise StopAsyncIteration
        self._left -= 1
        engine = self._engine
        model = engine.first if engine.stale_turns else engine.loaded
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([self._ids])).logits[0, -1], dim=-1)
        token_id = self._random.randrange(len(scores))
        self._ids.append(token_id)
        self._versions.append(f"{engine._takes} updates are left")
        return Delta([token_id], [float(scores[token_id])])

    async def __aexit__(self, *_: object) -> None:
        self.finish = self.finish or Finish(FinishReason.ABORT, versions=self._spans())

    def _spans(self) -> tuple[VersionSpan, ...]:
        old = self._versions.count(self._versions[0])
        if old == len(self._versions):
            return (VersionSpan(self._versions[0], 0, old),)
        cut = old + self._engine.late_versions
        return VersionSpan(self._versions[0], 0, cut), VersionSpan(self._versions[-1], cut, len(self._versions))


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({}, ""),
        ({"stale_turns": True}, "ids that turns sampled with the new weights, around the update: the engine's"),
        ({"late_versions": 3}, "ids that turns sampled with the old weights, around the update: the engine's"),
    ],
    ids=["right", "stale turns", "late versions"],
)
def test_ids_of_turns_around_an_update_are_of_their_weights(
    fault: dict[str, Any], reason: str, small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchTurns(small_llama, takes=9)
    for name, value in fault.items():
        setattr(engine, name, value)
    # The first way leaves other weights in the engine.
    _, row = check_with([engine], small_llama, [Way.AFTER_SLEEP, Way.UNDER_TURNS], tmp_path, monkeypatch).rows
    assert row.verdict is (TensorVerdict.WRONG if reason else TensorVerdict.RIGHT), row
    assert row.reason.startswith(reason)
    assert row.median is not None


def test_update_without_turns_of_both_weights_proves_nothing(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All turns end before the update."""
    (row,) = check_with([TorchEngine(small_llama, takes=1)], small_llama, [Way.UNDER_TURNS], tmp_path, monkeypatch).rows
    assert row.verdict is TensorVerdict.REFUSED
    assert "no turn had 8 ids of the old weights and 8 of the new ones" in row.reason
