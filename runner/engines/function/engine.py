"""Token engine: an `Engine` whose ids are sampled by a function of the caller."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
import anyio.to_thread
from anyio.lowlevel import current_token

from runner import checked
from runner.engines.base import GenerationRequest, ModelEngine, Session
from runner.engines.function.runtime import FunctionAdapters, FunctionRuntime
from runner.engines.function.stream import FunctionSession, FunctionStream
from runner.engines.function.token_function import LogprobsKind, TokenFeature, TokenFunction
from runner.engines.gate import AdmissionGate, affinity_beside
from runner.errors import BadModel, BadOption, RequestRejected
from runner.models import absolute_paths, chat_template, resolve_sent, sendable_template, stop_ids
from runner.options import Constraint, Sampling
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

__all__ = ["TokenEngine"]

_OFF = Sampling.defaults()


class TokenEngine(ModelEngine[FunctionRuntime]):
    """Engine over an async function of token ids, for trainers that own the inference engine.

    async def generate(prompt, sampling, *, session):
        said = await client.generate(session, prompt, sampling.max_tokens, sampling.temperature)
        return TokenOutput(said.ids, said.logprobs, sampling.finish_of(said.ids))

    engine = TokenEngine(generate, tokenizer="Qwen/Qwen3-0.6B", context=32_768)

    Unsupported features are refused with an error that names the feature: settings of `Sampling` and grammars that
    `takes` does not list, adapters that `adapters` does not list, forced ids, and new weights. Outputs are checked: an
    invalid output, such as an id outside of the vocabulary, fails the turn with an error that names the invalid field.

    Args:
        generate: the function; see `TokenFunction`.
        tokenizer: the model's folder or Hugging Face id, from which only small files are read, or a `Tokenizer`.
        template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
        stop_ids: the ids that end a turn; default the stop ids of the model.
        context: maximum number of ids of prompt and turn together in the function's engine.
        places: maximum number of concurrent calls; further ones wait at the gate.
        takes: fields of `TokenSampling` that the function supports besides `max_tokens`, `temperature`, `seed` and
            `stop_ids`; `takes=TokenFeature` declares all of them.
        logprobs: distribution of the function's log-probabilities; see `LogprobsKind`.
        adapters: values that the function supports for `TokenSampling.adapter`.

    Raises (creating or entering):
        BadOption: a setting is invalid, or the function has another signature.
        BadModel: the model does not exist, or has no stop ids.
        BadTemplate: the template cannot be loaded.
    """

    vocabulary: int
    """Number of ids that can be sampled, with the model's padding rows; set when the engine is entered."""

    def __init__(
        self,
        generate: TokenFunction,
        *,
        tokenizer: str | os.PathLike[str] | Tokenizer,
        template: str | Path | ChatTemplate | None = None,
        stop_ids: Sequence[int] | None = None,
        context: int,
        places: int = 256,
        takes: Iterable[TokenFeature | str] = (),
        logprobs: LogprobsKind | str = LogprobsKind.PROCESSED,
        adapters: Sequence[str] = (),
    ) -> None:
        _require_function(generate)
        for name, value, least in (("context", context, 2), ("places", places, 1)):
            checked.whole(f"TokenEngine({name}={value!r})", value, least=least)
        if logprobs not in list(LogprobsKind):
            raise BadOption(f"TokenEngine(logprobs={logprobs!r:.60}): give one of {', '.join(LogprobsKind)}.")
        self.context = context
        self.places = places
        self.takes = _features(takes)
        """Settings that the function supports besides `max_tokens`, `temperature`, `seed` and `stop_ids`."""
        self._generate = generate
        self._given = tokenizer
        self._paths: dict[str, str] = {}
        self._given_template = template
        self._given_stop_ids = None if stop_ids is None else _stop_ids(stop_ids)
        self._logprobs = LogprobsKind(logprobs)
        self._adapters = tuple(adapters)
        FunctionAdapters(self._adapters)  # this call checks the names
        if not isinstance(tokenizer, str | os.PathLike):
            self._load_object(tokenizer)
        self.runtime = None
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._require_not_entered()
        if isinstance(self._given, str | os.PathLike):
            # The files are read in a thread, since this takes some tenths of a second and would block other episodes.
            await anyio.to_thread.run_sync(self._load_folder, self._given, abandon_on_cancel=True)
        if self._given_stop_ids is not None:
            self.stop_ids = self._given_stop_ids
        if beyond := [token_id for token_id in self.stop_ids if token_id >= self.vocabulary]:
            raise BadOption(
                f"TokenEngine(stop_ids=): {beyond[0]} is not an id; the model's are 0 to {self.vocabulary - 1}."
            )
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self.runtime = FunctionRuntime(
            self._generate,
            self._tasks,
            gate=AdmissionGate(self.places, sys.maxsize),
            adapters=FunctionAdapters(self._adapters),
            context=self.context,
            vocabulary=self.vocabulary,
            logprobs=self._logprobs,
        )
        self.running, self.loop = True, current_token()
        return self

    def __getstate__(self) -> dict[str, Any]:
        template = sendable_template(self._given_template)
        return {**self.__dict__, "_given_template": template, "_paths": {**self._paths, **absolute_paths(self._given)}}

    def _load_object(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "fingerprint"):
            raise BadOption(
                f"TokenEngine(tokenizer={type(tokenizer).__name__}): give the folder that it was loaded from, such as "
                "`tokenizer.name_or_path`, or a Tokenizer of `runner.tokens.tokenizer.load_tokenizer(folder)`."
            )
        if self._given_template is None:
            raise BadOption("TokenEngine(template=): a tokenizer alone has no chat template; give one.")
        if self._given_stop_ids is None and tokenizer.eos_id is None:
            raise BadOption("TokenEngine(stop_ids=): the tokenizer has no EOS; give the ids that end a turn.")
        self.tokenizer: Tokenizer = tokenizer
        given = self._given_template
        self.template = given if isinstance(given, ChatTemplate) else ChatTemplate.load(given)
        self.stop_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.vocabulary = tokenizer.size

    def _load_folder(self, name: str | os.PathLike[str]) -> None:
        from runner.tokens.tokenizer import load_tokenizer

        model = resolve_sent(name, self._paths)
        self.tokenizer = load_tokenizer(model.folder)
        self.template = chat_template(model, self._given_template)
        self.stop_ids = stop_ids(model, self.tokenizer.eos_id)
        self.vocabulary = max(self.tokenizer.size, _rows(model.folder))
        if not self.stop_ids and self._given_stop_ids is None:
            raise BadModel(f"the model {model.name!r} has no stop ids: give TokenEngine(stop_ids=).")

    async def __aexit__(self, *_: object) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        self.running = False
        await self.entered_runtime.stop()
        # The task group does not receive the exception, since the group would wrap it in an exception group.
        await tasks.__aexit__(None, None, None)

    def stream(self, request: GenerationRequest) -> FunctionStream:
        runtime = self.entered_runtime
        try:
            self.check_sampling(request.sampling)
            if request.constraint is not None:
                self.check_constraint(request.constraint)
        except BadOption as error:
            raise RequestRejected(f"{request.name}: {error}") from error
        if request.extra:
            named = ", ".join(request.extra)
            raise RequestRejected(f"{request.name}: generate() takes no extra arguments ({named}): leave them out")
        return FunctionStream(runtime, request)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """Create a handle for one conversation, with the id that the function receives as `session`."""
        return FunctionSession(late=late, affinity=affinity_beside(beside))

    def check_sampling(self, sampling: Sampling) -> None:
        """Check that the function supports a sampling.

        Raises:
            BadOption: the function does not support a field; the message names it.
        """
        for feature in TokenFeature:
            value = getattr(sampling, feature.value, None)
            if feature not in self.takes and value and value != getattr(_OFF, feature.value, None):
                raise BadOption(
                    f"Sampling({feature.value}={value!r:.60}): generate() does not support it. Leave it out, or let "
                    f"the function apply `sampling.{feature.value}` and declare "
                    f"it: TokenEngine(takes=[{feature.value!r}])."
                )
        for name in ("schema", "regex", "choice"):
            if getattr(sampling, name) and TokenFeature.CONSTRAINT not in self.takes:
                raise _no_constraints(f"Sampling({name}=)")

    def check_constraint(self, constraint: Constraint) -> None:
        """Check that the function enforces grammars.

        Raises:
            BadOption: the function does not enforce grammars.
        """
        if TokenFeature.CONSTRAINT not in self.takes:
            raise _no_constraints(f"a turn under a grammar ({constraint.kind.value})")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "function",
            "function": _name(self._generate),
            "tokenizer": self.tokenizer.fingerprint,
            "template": self.template.name,
            "stop_ids": list(self.stop_ids),
            "context": self.context,
            "places": self.places,
            "takes": sorted(self.takes),
            "logprobs": self._logprobs.value,
        }


def _no_constraints(what: str) -> BadOption:
    return BadOption(
        f"{what}: generate() enforces no grammar, which required and strict tool calls, schema, regex and choice "
        "need. Play without them, or let the function enforce `sampling.constraint` and declare it: "
        "TokenEngine(takes=['constraint'])."
    )


def _require_function(generate: Any) -> None:
    shape = "async def generate(prompt, sampling, *, session)"
    if not callable(generate):
        raise BadOption(f"TokenEngine({generate!r:.60}): give a function, `{shape}`.")
    try:
        inspect.signature(generate).bind([], None, session="")
    except TypeError as error:
        raise BadOption(f"TokenEngine({_name(generate)}): give a function to call as `{shape}`: {error}.") from None
    except ValueError:  # a builtin without a signature
        return


def _features(takes: Iterable[TokenFeature | str]) -> frozenset[TokenFeature]:
    names = [takes] if isinstance(takes, str) else list(takes)
    for name in names:
        if name not in list(TokenFeature):
            raise BadOption(f"TokenEngine(takes=[{name!r:.60}]): give some of {', '.join(TokenFeature)}.")
    return frozenset(map(TokenFeature, names))


def _stop_ids(given: Sequence[int]) -> tuple[int, ...]:
    if not given:
        raise BadOption("TokenEngine(stop_ids=[]): no id would end a turn; give stop ids, or None for the model's own.")
    for token_id in given:
        checked.whole(f"TokenEngine(stop_ids={list(given)!r:.60})", token_id, least=0)
    return tuple(given)


def _rows(folder: Path) -> int:
    """Return the number of rows of the model's embedding, with padding, from config.json; 0 if unknown."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config") or {})]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
