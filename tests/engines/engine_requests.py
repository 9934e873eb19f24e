"""Requests for tests of the scripted engine, and readers of its answers."""

from dataclasses import dataclass, replace
from typing import Any

from runner.engines.base import Delta, DeltaStream, FinishReason, GenerationRequest
from runner.options import Sampling
from runner.testing import ScriptedEngine
from runner.tokens.byte_tokenizer import ByteTokenizer

END = "<|im_end|>"
(STOP,) = ByteTokenizer().encode(END)


def request(name: str = "episode/main/0", *, max_tokens: int = 1000, **fields: Any) -> GenerationRequest:
    fields = {"prompt": [72, 105], "stop_ids": (STOP,), **fields}
    return GenerationRequest(name=name, sampling=replace(Sampling.defaults(), max_tokens=max_tokens), **fields)


@dataclass
class Said:
    """The answer to one request."""

    deltas: list[Delta]
    stream: DeltaStream

    @property
    def ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for delta in self.deltas for logprob in delta.logprobs or ()]

    @property
    def sizes(self) -> list[int]:
        return [len(delta.token_ids) for delta in self.deltas]

    @property
    def text(self) -> str:
        return ByteTokenizer().decode(self.ids)

    @property
    def end(self) -> tuple[FinishReason, int | str | None]:
        assert self.stream.finish is not None
        return self.stream.finish.reason, self.stream.finish.stop


async def say(engine: ScriptedEngine, asked: GenerationRequest | None = None) -> Said:
    stream = engine.stream(asked or request())
    async with stream:
        deltas = [delta async for delta in stream]
    return Said(deltas, stream)


async def converse(engine: ScriptedEngine, turns: int, name: str = "episode/main") -> list[str]:
    session = engine.session()
    said = [await say(engine, request(f"{name}/{turn}", session=session)) for turn in range(turns)]
    engine.close_session(session)
    return [turn.text for turn in said]
