"""Replies out of a recorded run: what was said to the same prompt is said again.

A run file stands above the engines, so a scripted engine cannot open one by itself: importing this module teaches it
to. `ScriptedEngine` of `runner` and of `runner.testing` comes from here.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import to_thread

from runner.engines.base import FinishReason
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.replies import EncodedReply, ReplyEncoder, ReplySource, reply_source
from runner.engines.scripted.script import ModelCall, Reply, packed
from runner.errors import RequestRejected
from runner.store.reader import RunFile
from runner.trajectory import Turn

__all__ = ["RecordedReplies", "ScriptedEngine"]


class RecordedReplies(ReplySource):
    """Says what was said to the same prompt; where that differed, what was said with the same seed.

    Args:
        run: the run file, or where it is.
    """

    def __init__(self, run: Path | RunFile) -> None:
        self._run = run
        # What was sampled is kept packed, and of each prompt, which is long, only a digest.
        self._said: dict[bytes, list[_Said]] = {}

    async def open(self) -> None:
        self._said = await to_thread.run_sync(self._read)

    def _read(self) -> dict[bytes, list[_Said]]:
        said: dict[bytes, list[_Said]] = {}
        with self._opened() as run:
            for row in run.rows(trained=None):
                for turn in run.trajectory(row).turns:
                    said.setdefault(_digest(turn.prompt_ids), []).append(_Said.of(turn))
        return said

    @contextmanager
    def _opened(self) -> Iterator[RunFile]:
        if isinstance(self._run, RunFile):  # whose end is its owner's affair
            yield self._run
        else:
            with RunFile(self._run) as run:
                yield run

    def reply(self, call: ModelCall) -> EncodedReply:
        said = self._said.get(_digest(call.prompt_ids))
        if said is None:
            raise RequestRejected(
                f"{call.request.name}: the recorded run has no turn with this prompt of {len(call.prompt_ids)} ids: "
                "something before it differs (task, template, tools, an answer)."
            )
        seed = call.request.seed
        same_seed = (turn for turn in said if seed is not None and turn.seed == seed)
        return next(same_seed, said[call.key % len(said)]).encoded()

    def describe(self) -> Any:
        return {"recorded": str(self._run.path if isinstance(self._run, RunFile) else self._run)}


@reply_source.register(Path)
@reply_source.register(RunFile)
def _recorded(run: Path | RunFile, encoder: ReplyEncoder) -> RecordedReplies:
    return RecordedReplies(run)


@dataclass(frozen=True, slots=True)
class _Said:
    """What one turn of a recorded run said."""

    ids: array[int]
    logprobs: array[float]
    finish: FinishReason
    stop: int | str | None
    seed: int | None

    @classmethod
    def of(cls, turn: Turn) -> _Said:
        return cls(turn.token_ids, turn.logprobs, turn.finish, turn.stop, turn.seed)

    def encoded(self) -> EncodedReply:
        # A turn that we ended ourselves, by a stop string or for want of room, was no end to the engine.
        ours = self.finish is FinishReason.CONTEXT or (
            self.finish is FinishReason.STOP and not isinstance(self.stop, int)
        )
        reply = Reply(
            ids=self.ids,
            logprobs=None if any(map(math.isnan, self.logprobs)) else self.logprobs,
            finish=FinishReason.LENGTH if ours else self.finish,
            stop=self.stop if isinstance(self.stop, int) else None,
        )
        return EncodedReply(reply, self.ids.tolist())


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(packed(ids), digest_size=16).digest()
