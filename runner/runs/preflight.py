"""Checks before anything is sampled: chat templates, sampling options and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, time
from functools import partial
from typing import Any

import anyio.to_thread
from anyio.from_thread import check_cancelled

from runner.concurrency.threads import Job, Workers
from runner.engines.base import BaseEngine, Engine, vocabulary_size
from runner.episode.model import ChatModel
from runner.errors import BadOption, BadTemplate
from runner.options import HistoryPolicy, Sampling
from runner.tokens.bridging.refusal import Property
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate

__all__ = ["check_appends", "check_templates", "require_sampling"]


def require_sampling(engine: BaseEngine, sampling: Sampling) -> None:
    """Check that the engine supports the sampling options.

    Raises:
        BadOption: the engine does not support an option, has no adapter of that name, or lacks one of the token ids.
    """
    engine.check_sampling(sampling.over(Sampling.defaults()))
    if not isinstance(engine, Engine):
        return
    sampling.check_vocabulary(vocabulary_size(engine))
    if sampling.adapter and sampling.adapter not in engine.adapters:
        there = ", ".join(map(repr, engine.adapters)) or "none"
        raise BadOption(
            f"Sampling(adapter={sampling.adapter!r}): the engine has no adapter of that name; it has {there}. Enter "
            "the engine and `await engine.add_adapter(name, folder)` before the run; or use ScriptedEngine(adapters=)."
        )


async def check_templates(templates: Iterable[ChatTemplate], options: Mapping[str, Any], now: datetime) -> None:
    """Check the templates in another process, before they render anything in this one.

    Raises:
        BadTemplate: a template cannot be used: it does not compile, never ends, raises on a user message, ...
    """
    # This is imported here, so that importing Run does not import the template probe.
    from runner.template_probe import is_bundled, probe

    for template in dict.fromkeys(each for each in templates if not is_bundled(each)):
        look = partial(probe, template, options, now=_same_all_day(now), check_cancelled=check_cancelled)
        await anyio.to_thread.run_sync(look)


async def check_appends(chat: ChatModel, now: datetime, workers: Workers, *, tools: bool, system: bool) -> list[str]:
    """Messages about appends that are not exact, and about tokens that the template writes and the vocabulary lacks.

    An append extends a prompt by messages. The appends of bundled templates are exact and are not checked.

    Raises:
        BadTemplate: an append is not exact, and the history policy is refuse.
    """
    from runner.template_probe import is_bundled, probe

    # A run that forks renders histories again anyway, so its appends need not be exact.
    template = chat.renderer.template
    letters = list(_letters(chat))
    if chat.history.policy is HistoryPolicy.FORK or is_bundled(template):
        return letters
    look = partial(probe, template, chat.renderer.options, now=_same_all_day(now))
    profile = await workers.call(Job(look, "chat template"))
    missing = list(_missing(chat, profile, tools=tools, system=system))
    if missing and chat.history.policy is HistoryPolicy.REFUSE:
        raise BadTemplate(
            f"{missing[0]}. history='refuse' does not allow that: give history='append', or a template "
            "that check-template finds exact."
        )
    return [*letters, *missing]


def _letters(chat: ChatModel) -> Iterator[str]:
    from runner.tokens.control_text import lacking

    # A byte vocabulary belongs to a scripted engine without a model, so tokens that are spelled as letters do no harm.
    names = () if isinstance(chat.tokenizer, ByteTokenizer) else lacking(chat.renderer.rendered(), chat.tokenizer)
    if names:
        name = chat.renderer.template.name
        yield (
            f"template {name!r} writes {' '.join(names)}, for which the vocabulary has no token: "
            "the model receives them as plain text, which is right only if it was trained that way; see check-template"
        )


def _missing(chat: ChatModel, profile: Any, *, tools: bool, system: bool) -> Iterator[str]:
    from runner.tokens.probing.appends import Append, Exactness, verdicts

    user = Append.UNDER_SYSTEM if system else Append.USER
    met = [kind for kind in Append if kind is user or (tools and kind.needed and kind.calls)]
    for verdict in verdicts(chat.trial_bridger(), profile, tools=tools, kinds=met):
        if verdict.result is Exactness.UNSUPPORTED:
            name = chat.renderer.template.name
            raises = verdict.refusal is Property.TEMPLATE_RENDERS
            what = "an episode with such a turn ends" if raises else "each such turn starts a new segment"
            yield f"template {name!r}, {verdict.kind.value}: {what} ({verdict.refusal}: {verdict.explanation})"


def _same_all_day(now: datetime) -> datetime:
    """Return midnight of the day, since results for a template are cached for all runs of a day."""
    return datetime.combine(now.date(), time())
