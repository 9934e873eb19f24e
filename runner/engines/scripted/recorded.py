"""Replies from a recorded run: the recorded reply to the same prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from anyio import to_thread

from runner.engines.base import FinishReason
from runner.engines.scripted.model import EncodedReply, ScriptedModel
from runner.engines.scripted.run_files import RecordedRun, RecordedTurn, open_run_file
from runner.engines.scripted.script import ModelCall, Reply, packed
from runner.errors import RequestRejected

__all__ = ["RecordedReplies"]


class RecordedReplies(ScriptedModel):
    """Model that repeats the recorded reply to a prompt; of several different ones that with the same seed.

    Args:
        run: the run file, or its path.
    """

    def __init__(self, run: Path | RecordedRun) -> None:
        self._run = run
        # Seed and reply by a digest of the prompt, which is long; ids stay packed.
        self._said: dict[bytes, list[tuple[int | None, Reply]]] = {}

    async def open(self) -> None:
        self._said = await to_thread.run_sync(self._read)

    def _read(self) -> dict[bytes, list[tuple[int | None, Reply]]]:
        said: dict[bytes, list[tuple[int | None, Reply]]] = {}
        # An open file is closed by its owner.
        with open_run_file(self._run) if isinstance(self._run, Path) else nullcontext(self._run) as run:
            for row in run.rows(trained=None):
                for turn in run.trajectory(row).turns:
                    said.setdefault(_digest(turn.prompt_ids), []).append((turn.seed, _reply(turn)))
        return said

    def reply(self, call: ModelCall) -> EncodedReply:
        said = self._said.get(_digest(call.prompt_ids))
        if said is None:
            raise RequestRejected(
                f"{call.request.name}: the recorded run has no turn with this prompt of {len(call.prompt_ids)} ids: "
                "something before it differs (task, template, tools, an answer)."
            )
        wanted = call.request.seed
        same_seed = (reply for seed, reply in said if wanted is not None and seed == wanted)
        reply = next(same_seed, said[call.key % len(said)][1])
        return EncodedReply(reply, list(reply.ids or ()))

    def describe(self) -> Any:
        return {"recorded": str(self._run if isinstance(self._run, Path) else self._run.path)}


def _reply(turn: RecordedTurn) -> Reply:
    """Convert a recorded turn to a reply."""
    stop = turn.stop if isinstance(turn.stop, int) else None
    # The runner ends a turn at a stop string or the context limit; for the engine it was cut.
    ours = turn.finish is FinishReason.CONTEXT or (turn.finish is FinishReason.STOP and stop is None)
    logprobs = None if any(map(math.isnan, turn.logprobs)) else turn.logprobs
    return Reply(
        ids=turn.token_ids,
        logprobs=logprobs,
        top_logprobs=turn.top,
        finish=FinishReason.LENGTH if ours else turn.finish,
        stop=stop,
    )


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(packed(ids), digest_size=16).digest()
