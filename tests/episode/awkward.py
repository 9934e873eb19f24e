"""An engine whose model samples other ids than the tokenizer: text that is encoded again has other ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.engines.scripted.replies import ReplyEncoder
from runner.engines.scripted.script import as_reply
from runner.testing import AwkwardTokenizer, ScriptedEngine
from tests.playing import recording

__all__ = ["misspelling"]


def misspelling(
    says: Callable[[Any], Any] | Sequence[Any] | Mapping[str, Sequence[Any]], **settings: Any
) -> ScriptedEngine:
    """Return an engine with these replies: a function, a list in the order of requests, or a list for each agent."""
    tokenizer = AwkwardTokenizer()
    lists = {agent: iter(replies) for agent, replies in says.items()} if isinstance(says, Mapping) else {}
    in_order = iter(says) if isinstance(says, Sequence) else iter(())

    def in_letters(asked: Any) -> Any:
        said = says(asked) if callable(says) else next(lists.get(asked.agent, in_order))
        reply = as_reply(said)
        if reply.ids is not None:
            return reply
        text = tokenizer.decode(encoder.encode(reply).ids)
        return replace(reply, text="", calls=(), ids=tokenizer.misspell(text))

    engine = recording(in_letters, tokenizer=tokenizer, template="hermes", **settings)
    encoder = ReplyEncoder(engine.tokenizer, engine.template)
    return engine
