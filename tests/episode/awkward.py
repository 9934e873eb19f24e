"""An engine whose model spells its words as encoding never would: ids that were encoded anew are others."""

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
    """An engine that says so: what a function gives, or a list in the order in which it is asked, also by agent."""
    tokenizer = AwkwardTokenizer()
    lists = {agent: iter(replies) for agent, replies in says.items()} if isinstance(says, Mapping) else {}
    in_order = iter(says) if isinstance(says, Sequence) else iter(())

    def spelt(asked: Any) -> Any:
        said = says(asked) if callable(says) else next(lists.get(asked.agent, in_order))
        reply = as_reply(said)
        if reply.ids is not None:
            return reply
        text = tokenizer.decode(encoder.encode(reply).ids)
        return replace(reply, text="", calls=(), ids=tokenizer.misspell(text))

    engine = recording(spelt, tokenizer=tokenizer, template="hermes", **settings)
    encoder = ReplyEncoder(engine.tokenizer, engine.template)
    return engine
