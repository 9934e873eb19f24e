"""The file format of recordings: small, sorted and readable JSON, validated when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from runner.engines.base import Delta, Engine, Finish, FinishReason
from runner.engines.scripted.script import Reply
from runner.errors import BadInput, DeltarunnerError
from runner.testing.vocabulary import AwkwardTokenizer, PlainTokenizer
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer, load_tokenizer
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["RERECORD_ADVICE", "RecordedRequest", "Recording", "read_recording", "write_recording"]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

RECORDING_VERSION: Final = 1
RERECORD_ADVICE: Final = "run pytest with --runner-record=rewrite to record it again"

_TOKENIZERS: Final[dict[str, Callable[[], ByteTokenizer]]] = {
    "bytes": PlainTokenizer,
    "awkward": AwkwardTokenizer,
}
"""Vocabularies of the test kit, by their names in files."""


@dataclass(slots=True)
class RecordedRequest:
    """One request and its answer."""

    name: str
    """Name of the request: episode, agent and turn."""
    prompt: array[int]
    said: array[int] = field(default_factory=lambda: array("i"))
    """All sampled ids, including ids that were not read."""
    logprobs: list[float] | None = field(default_factory=list)
    """Log-probability of each sampled id in nats; None if the engine returned none."""
    finish: FinishReason | None = None
    """Reason for the end of the turn; None before the end."""
    stop: int | None = None
    """The stop id that ended the turn, if any."""
    top: TopLogprobs | None = None
    """Top log-probabilities at each sampled id; None if they were not requested."""

    def add(self, delta: Delta) -> None:
        self.said.extend(delta.token_ids)
        if delta.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.top is not None and self.top is None:
            self.top = delta.top.part(0, len(delta.top))
        elif delta.top is not None and self.top is not None:
            self.top.extend(delta.top)

    def end(self, finish: Finish | None) -> None:
        """Record the end of the turn; None stands for a failed engine."""
        self.finish = finish.reason if finish is not None else FinishReason.ERROR
        self.stop = finish.stop if finish is not None and isinstance(finish.stop, int) else None

    def reply(self) -> Reply:
        """The same turn as a reply of a scripted engine."""
        # A turn without a stop id is replayed as LENGTH. If the runner cut the turn, it cuts the turn again.
        stops = self.finish is FinishReason.STOP
        finish = FinishReason.STOP if stops else FinishReason.LENGTH
        stop = self.stop if stops else None
        return Reply(ids=self.said, logprobs=self.logprobs, top_logprobs=self.top, finish=finish, stop=stop)


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of a recording file: turns, and properties of the model."""

    path: Path
    turns: Sequence[RecordedRequest]
    """The turns, sorted by name."""
    tokenizer: Tokenizer
    """The vocabulary, given or loaded by its name in the file."""
    template: ChatTemplate
    stop_ids: tuple[int, ...]
    context: int
    """Maximum number of ids of a prompt and its turn together."""


def write_recording(path: Path, engine: Engine, turns: Sequence[RecordedRequest]) -> None:
    """Write a recording of `engine`, sorted so that it does not depend on the order of play."""
    in_order = sorted(turns, key=lambda turn: _natural_key(turn.name))
    document = {"engine": _described(engine), "calls": list(_written(in_order, engine.tokenizer))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_as_text(document), encoding="utf-8")


def read_recording(path: Path, tokenizer: Tokenizer | None) -> Recording:
    """Read a recording. Without `tokenizer`, the vocabulary is loaded by the model's name.

    Raises:
        BadInput: the file, its vocabulary or its template cannot be used.
    """
    document = _read(path)
    said = document["engine"]
    return Recording(
        path,
        list(_calls(document["calls"])),
        _vocabulary(path, said, tokenizer),
        _template(path, said["template"]),
        tuple(said["stop_ids"]),
        said["context"],
    )


# --- writing


def _described(engine: Engine) -> dict[str, Any]:
    tokenizer, template, model = engine.tokenizer, engine.template, engine.describe().get("model")
    own = next((name for name, make in _TOKENIZERS.items() if make().fingerprint == tokenizer.fingerprint), None)
    try:
        bundled = ChatTemplate.load(template.name).fingerprint == template.fingerprint
    except DeltarunnerError:
        bundled = False
    text: dict[str, Any] = {} if bundled else {"text": template.text, "variables": dict(template.variables)}
    if template.response_template is not None:
        text["response_template"] = template.response_template
    return {
        "vocabulary": own or (model if isinstance(model, str) else None),
        "fingerprint": tokenizer.fingerprint,
        "template": {"name": template.name, "fingerprint": template.fingerprint, **text},
        "stop_ids": list(engine.stop_ids),
        "context": engine.context,
    }


def _written(calls: Sequence[RecordedRequest], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    names: dict[str, int] = {}
    for number, call in enumerate(calls):
        names[call.name] = names.get(call.name, 0) + 1
        if names[call.name] > 1:  # the episode was repeated
            call = replace(call, name=f"{call.name} ({names[call.name]})")
        # A prompt is written from the end of its longest known prefix, so that the file does not grow quadratically
        # with the number of turns.
        before = [earlier for earlier in calls[:number] if _is_prefix(earlier, call)]
        longest = max(before, key=lambda earlier: len(earlier.prompt) + len(earlier.said), default=None)
        known = len(longest.prompt) + len(longest.said) if longest is not None else 0
        new = call.prompt[known:]
        logprobs = call.logprobs if call.logprobs is not None and all(map(math.isfinite, call.logprobs)) else None
        yield {
            "call": call.name,
            "after": longest.name if longest is not None else None,
            "prompt": tokenizer.decode(new),
            "prompt_ids": _packed(new),
            "said": tokenizer.decode(call.said),
            "said_ids": _packed(call.said),
            "logprobs": None if logprobs is None else " ".join(f"{value:.4f}" for value in logprobs),
            "finish": call.finish,
            "stop": call.stop,
            **({} if call.top is None else _written_top(call.top)),
        }


def _written_top(top: TopLogprobs) -> dict[str, Any]:
    return {
        "top_count": top.count,
        "top_ids": _packed(top.ids),
        "top_logprobs": " ".join(f"{value:.4f}" for value in top.logprobs),  # may contain "-inf"
    }


def _is_prefix(earlier: RecordedRequest, call: RecordedRequest) -> bool:
    known = earlier.prompt + earlier.said
    return len(known) <= len(call.prompt) and call.prompt[: len(known)] == known


def _packed(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key by which turn 9 comes before turn 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _as_text(document: dict[str, Any]) -> str:
    def lines(fields: dict[str, Any]) -> str:
        return ",\n".join(
            f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()
        )

    calls = ",\n".join(f"{{\n{lines(call)}\n}}" for call in document["calls"])
    head = lines({"recording": RECORDING_VERSION, "digest": _digest(document), "engine": document["engine"]})
    return f'{{\n{head},\n "calls": [\n{calls}\n]\n}}\n'


def _digest(document: dict[str, Any]) -> str:
    content = json.dumps([document["engine"], document["calls"]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# --- reading


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"the recording {path} does not exist: run pytest with --runner-record=once, on a machine with the model."
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}): restore it, or {RERECORD_ADVICE}.") from None
    version = document.get("recording") if isinstance(document, dict) else None
    if version is None:
        raise BadInput(f"{path} is not a recording: restore it, or {RERECORD_ADVICE}.")
    if version != RECORDING_VERSION:
        raise BadInput(
            f"{path} is a recording of version {version!r} and not of version {RECORDING_VERSION}: {RERECORD_ADVICE}."
        )
    try:
        digest = _digest(document)
    except KeyError as missing:
        raise BadInput(f"{path} has no {missing}: it was edited by hand. Restore it, or {RERECORD_ADVICE}.") from None
    if document.get("digest") != digest:
        raise BadInput(
            f"{path} was edited by hand or merged: its content is not as recorded. Restore it, or {RERECORD_ADVICE}."
        )
    return document


def _calls(written: Sequence[dict[str, Any]]) -> Iterator[RecordedRequest]:
    known: dict[str, RecordedRequest] = {}
    for fields in written:
        before = known.get(fields["after"] or "")
        prompt = before.prompt + before.said if before is not None else array("i")
        logprobs = fields["logprobs"]
        call = known[fields["call"]] = RecordedRequest(
            fields["call"],
            prompt + _ids(fields["prompt_ids"]),
            _ids(fields["said_ids"]),
            None if logprobs is None else [float(value) for value in logprobs.split()],
            FinishReason(fields["finish"]),
            fields["stop"],
            _read_top(fields) if "top_count" in fields else None,
        )
        yield call


def _read_top(fields: dict[str, Any]) -> TopLogprobs:
    values = array("f", map(float, fields["top_logprobs"].split()))
    return TopLogprobs(fields["top_count"], _ids(fields["top_ids"]), values)


def _ids(text: str) -> array[int]:
    return array("i", map(int, text.split()))


def _vocabulary(path: Path, said: dict[str, Any], given: Tokenizer | None) -> Tokenizer:
    name = said["vocabulary"]
    tokenizer = given if given is not None else _load(path, name)
    if tokenizer.fingerprint != said["fingerprint"]:
        raise BadInput(
            f"{path} was recorded with another vocabulary ({said['fingerprint']}, {name}) than this one "
            f"({tokenizer.fingerprint}): give the recorded one with tokenizer=, or {RERECORD_ADVICE}."
        )
    return tokenizer


def _load(path: Path, name: Any) -> Tokenizer:
    if not isinstance(name, str):
        raise BadInput(f"{path} does not name the vocabulary that it was recorded with: give its tokenizer=.")
    if name in _TOKENIZERS:
        return _TOKENIZERS[name]()
    from runner.models import resolve_model

    try:
        return load_tokenizer(resolve_model(name).folder)
    except DeltarunnerError as error:
        raise BadInput(
            f"{path} needs the vocabulary of {name!r}, which cannot be loaded: {error} Or give it with tokenizer=."
        ) from None


def _template(path: Path, said: dict[str, Any]) -> ChatTemplate:
    if "text" in said:
        return ChatTemplate(said["text"], said["name"], said["variables"], said.get("response_template"))
    template = ChatTemplate.load(said["name"])
    if template.fingerprint != said["fingerprint"]:
        raise BadInput(f"{path} was recorded with another version of the template {said['name']!r}: {RERECORD_ADVICE}.")
    return template
