"""Sources of scripted replies: a list, a function, a recorded run, or one of these per agent."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from anyio import to_thread

from runner.engines.base import FinishReason
from runner.engines.scripted.model import EncodedReply, ScriptedModel
from runner.engines.scripted.run_files import RecordedRun, RecordedTurn, open_run_file
from runner.engines.scripted.script import Answer, ModelCall, Reply, Speaker, as_reply, packed
from runner.errors import BadOption, RequestRejected
from runner.parsing.call_writer import Unwritable
from runner.parsing.format_cache import cached_format
from runner.parsing.harmony import MESSAGE, NEXT_MESSAGE
from runner.parsing.parser import TurnParser
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Replies", "ReplyEncoder", "scripted_model"]


class RecordedReplies(ScriptedModel):
    """Model that repeats the recorded reply to a prompt.

    If the run has several replies to the prompt, the model repeats the reply with the request's seed. Without such a
    reply, the model selects one by `ModelCall.key`.

    Args:
        run: the run file, or its path.
    """

    def __init__(self, run: Path | RecordedRun) -> None:
        self._run = run
        # Pairs of seed and reply, by the digest of their prompt, since prompts are long. The ids stay packed.
        self._said: dict[bytes, list[tuple[int | None, Reply]]] = {}

    async def open(self) -> None:
        self._said = await to_thread.run_sync(self._read)

    def _read(self) -> dict[bytes, list[tuple[int | None, Reply]]]:
        said: dict[bytes, list[tuple[int | None, Reply]]] = {}
        # A file that the caller opened is closed by the caller.
        with open_run_file(self._run) if isinstance(self._run, Path) else nullcontext(self._run) as run:
            for row in run.rows(trained=None):
                for turn in run.trajectory(row).turns:
                    said.setdefault(_digest(turn.prompt_ids), []).append((turn.seed, _reply(turn)))
        return said

    def reply(self, call: ModelCall) -> EncodedReply:
        said = self._said.get(_digest(call.prompt_ids))
        if said is None:
            raise RequestRejected(
                f"{call.request.name}: the recorded run has no turn with this prompt ({len(call.prompt_ids)} ids): "
                "the task, the template, the tools or an earlier answer differs. Use those of the recorded run."
            )
        wanted = call.request.seed
        same_seed = (reply for seed, reply in said if wanted is not None and seed == wanted)
        reply = next(same_seed, said[call.key % len(said)][1])
        return EncodedReply(reply, list(reply.ids or ()))

    def describe(self) -> Any:
        return {"recorded": str(self._run if isinstance(self._run, Path) else self._run.path)}


def _reply(turn: RecordedTurn) -> Reply:
    stop = turn.stop if isinstance(turn.stop, int) else None
    # The runner ends a turn at a stop string or the context limit. For the engine such a turn was cut.
    ours = turn.finish is FinishReason.CONTEXT or (turn.finish is FinishReason.STOP and stop is None)
    logprobs = None if any(map(math.isnan, turn.logprobs)) else turn.logprobs
    return Reply(
        ids=turn.token_ids,
        logprobs=logprobs,
        top_logprobs=turn.top,
        sampling_masks=turn.sampling_masks,
        finish=FinishReason.LENGTH if ours else turn.finish,
        stop=stop,
    )


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(packed(ids), digest_size=16).digest()


Replies: TypeAlias = str | Reply | Sequence[Answer] | Speaker | Mapping[str, "Replies"] | Path | RecordedRun
"""Replies of the model: one constant reply; a list that every conversation reads from its beginning; a function of the
turn; one of these for each agent by name; or a recorded run."""


class ReplyEncoder:
    """Encoder of replies, with the engine's tokenizer and the tool format of its template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        # Functions often repeat replies. The cache is bounded, since a function may also return a new reply every time.
        self._encode = lru_cache(maxsize=1024)(tokenizer.encode)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplyEncoder, (self._tokenizer, self._template)  # a cache cannot be pickled

    def encode(self, answer: Answer) -> EncodedReply:
        reply = as_reply(answer)
        if reply.ids is not None:
            return EncodedReply(reply, list(reply.ids))
        text = reply.text
        if reply.calls:
            calls = self._written(reply)
            closed = self._closed_thought(text)
            text = f"{closed}{self._beside(text)}{self._between}{calls}" if text else f"{closed}{calls}"
        return EncodedReply(reply, self._encode(text))

    def _written(self, reply: Reply) -> str:
        try:
            return self._parser.render(reply.calls)
        except Unwritable as error:
            names = ", ".join(call.name or "?" for call in reply.calls)
            raise BadOption(
                f"a reply that calls {names}: template {self._template.name!r} cannot write these calls: {error}. "
                "Give other calls, one a turn, or the turn as text; or give the engine template='pythonic' or 'hermes'."
            ) from None

    def _closed_thought(self, text: str) -> str:
        """Return the end mark for reasoning that the prompt began; "" if none is needed.

        Calls inside reasoning would not be read.
        """
        thought = self._parser.format.reasoning
        needed = thought is not None and thought.opened_by_prompt and thought.close.strip() not in text
        return thought.close if thought is not None and needed else ""

    def _beside(self, text: str) -> str:
        """Return the content before calls; in a format with channels it is a separate message."""
        plain = self._parser.format.harmony and "<|" not in text
        return f"<|channel|>commentary{MESSAGE}{text}{NEXT_MESSAGE}" if plain else text

    @property
    def _between(self) -> str:
        """Return the text between content and calls.

        It is the template's text, or a line break if the template has none; "" in a format with channels.
        """
        calls = self._parser.format.calls
        if self._parser.format.harmony:
            return ""
        return (calls.after_content if calls else None) or "\n"

    @cached_property
    def _parser(self) -> TurnParser:
        learnt = cached_format(self._template.renderer())
        if learnt.format.calls is None:
            why = f"{learnt.missing}: {learnt.why}" if learnt.missing else "its response_template only reads them"
            raise BadOption(
                f"call(): the format of template {self._template.name!r}'s tool calls could not be learnt ({why}). "
                "Give the engine template='pythonic' or 'hermes', or write the call as text."
            )
        return TurnParser(learnt.format)


def scripted_model(replies: Any, encoder: ReplyEncoder) -> ScriptedModel:
    """Return the model for `replies`.

    Raises:
        BadOption: `replies` has an unsupported type.
    """
    match replies:
        case str() | Reply():
            return _ConstantModel(replies, encoder)
        case Mapping() if replies:
            return _PerAgentModel({agent: scripted_model(own, encoder) for agent, own in replies.items()})
        case Sequence() if replies:
            return _ListModel(replies, encoder)
        case Path() | RecordedRun():
            return RecordedReplies(replies)
    if callable(replies):
        return _FunctionModel(replies, encoder)
    raise BadOption(
        f"ScriptedEngine({replies!r:.80}): give a string, a list of replies (not an empty one), a function, "
        "a dict of these by agent, or the path of a run file."
    )


class _ConstantModel(ScriptedModel):
    def __init__(self, answer: Answer, encoder: ReplyEncoder) -> None:
        self._encoded = encoder.encode(answer)

    def reply(self, call: ModelCall) -> EncodedReply:
        return self._encoded

    def describe(self) -> Any:
        return {"always": repr(self._encoded.reply)}


class _ListModel(ScriptedModel):
    def __init__(self, answers: Sequence[Answer], encoder: ReplyEncoder) -> None:
        self._encoded = [encoder.encode(answer) for answer in answers]

    def reply(self, call: ModelCall) -> EncodedReply:
        if call.turn < len(self._encoded):
            return self._encoded[call.turn]
        raise RequestRejected(
            f"{call.request.name}: the list of {len(self._encoded)} replies is exhausted: "
            f"this conversation requests number {call.turn + 1}. Add a reply, or give a function."
        )

    def describe(self) -> Any:
        digest = hashlib.sha256(repr([encoded.reply for encoded in self._encoded]).encode())
        return {"list": len(self._encoded), "digest": digest.hexdigest()[:16]}


class _PerAgentModel(ScriptedModel):
    def __init__(self, agents: Mapping[str, ScriptedModel]) -> None:
        self._agents = agents

    async def open(self) -> None:
        for model in self._agents.values():
            await model.open()

    def reply(self, call: ModelCall) -> EncodedReply | Awaitable[EncodedReply]:
        model = self._agents.get(call.agent)
        if model is None:
            known = ", ".join(self._agents)
            raise RequestRejected(
                f"{call.request.name}: no replies for agent {call.agent!r}, only for {known}: add its replies"
            )
        return model.reply(call)

    def describe(self) -> Any:
        return {"agents": {agent: model.describe() for agent, model in self._agents.items()}}


class _FunctionModel(ScriptedModel):
    def __init__(self, speaker: Speaker, encoder: ReplyEncoder) -> None:
        self._speaker = speaker
        self._encoder = encoder

    def reply(self, call: ModelCall) -> EncodedReply | Awaitable[EncodedReply]:
        answer = self._speaker(call)
        if inspect.isawaitable(answer):
            return self._later(answer)
        return self._encoder.encode(answer)

    async def _later(self, answer: Awaitable[Answer]) -> EncodedReply:
        return self._encoder.encode(await answer)

    def describe(self) -> Any:
        named: Callable[..., Any] = self._speaker if hasattr(self._speaker, "__qualname__") else type(self._speaker)
        return {"function": f"{named.__module__}:{named.__qualname__}"}
