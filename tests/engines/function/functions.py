"""Functions of token ids for tests, each of which uses an engine of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from runner.engines.base import Delta, Engine, Session
from runner.engines.function.engine import TokenEngine
from runner.engines.function.token_function import TokenFeature, TokenFunction, TokenOutput, TokenSampling

__all__ = ["EngineFunctions", "engine_over", "output_of"]


def output_of(delta: Delta, version: str) -> TokenOutput:
    """Convert the output of an engine of ours to the output of a function."""
    top = None
    if delta.top is not None:
        rows = zip(delta.top.id_rows().tolist(), delta.top.logprob_rows().tolist(), strict=True)
        top = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]
    finish = None if delta.finish is None else delta.finish.reason
    return TokenOutput(delta.token_ids, delta.logprobs, finish, version, top)


class EngineFunctions:
    """Functions that use an engine of ours."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.sessions: dict[str, Session] = {}
        """Sessions of the engine by the id that the function received."""

    def _request(self, prompt: list[int], sampling: TokenSampling, session: str) -> Any:
        inner = self.sessions.setdefault(session, self.inner.session())
        return replace(sampling.request, prompt=prompt, session=inner)

    async def streamed(self, prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        async with self.inner.stream(self._request(prompt, sampling, session)) as deltas:
            async for delta in deltas:
                yield output_of(delta, self.inner.weight_version)

    async def whole(self, prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        outputs = [output async for output in self.streamed(prompt, sampling, session=session)]
        ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
        top = [row for output in outputs for row in output.top or ()]
        return TokenOutput(ids, logprobs, outputs[-1].finish, outputs[-1].version, top)


def engine_over(
    inner: Engine, *, streamed: bool = True, function: TokenFunction | None = None, **settings: Any
) -> TokenEngine:
    """Return a token engine whose function uses a running engine of ours."""
    functions = EngineFunctions(inner)
    settings = {"context": inner.context, "places": inner.places, "takes": TokenFeature, **settings}
    return TokenEngine(
        function or (functions.streamed if streamed else functions.whole),
        tokenizer=inner.tokenizer,
        template=inner.template,
        stop_ids=inner.stop_ids,
        **settings,
    )
