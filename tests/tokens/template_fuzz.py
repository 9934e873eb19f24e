"""The promise of a bridge, checked for random templates and conversations.

Every bridge is exact: it appends the same text that the template writes after the turn in a render of the whole
conversation, with the real words of every turn. `python -m tests.tokens.template_fuzz MINUTES SEED` searches for a
wrong bridge, with other templates in every round.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate, Renderer, TemplateRaised
from tests.tokens.bridging import ADD
from tests.tokens.template_grammar import Written, written

__all__ = ["WrongBridge", "check_bridges", "look_at_new_templates"]

TOOLS = [ADD]
STOP = "<|im_end|>"


class WrongBridge(AssertionError):
    """A bridge that differs from the template's text."""


@cache
def _tokenizer(added: tuple[str, ...]) -> ByteTokenizer:
    return ByteTokenizer(added_tokens=added)


def check_bridges(case: Written, seen: Counter[str] | None = None) -> None:
    """Check that every bridge of the conversations is exact. `seen` counts the results by name.

    Raises: WrongBridge: a bridge is not exact.
    """
    seen = Counter() if seen is None else seen
    renderer = ChatTemplate(case.template, name="drawn").renderer(now=datetime(2026, 1, 1))
    tokenizer = _tokenizer(case.added)
    stop = tokenizer.encode(STOP)[0]
    shared = Bridger(tokenizer, renderer, [stop])
    for conversation in case.conversations:
        bridged = False
        for number, history, new in _turns(conversation):
            # The prompt of a turn is a bridge, or a render if there is no bridge. If the template refuses the render,
            # because it hides the last message, only the end of a bridge can be compared.
            asked = bridged or _asks(shared, history[:-1])
            became = _check(renderer, tokenizer, shared, number, history, new, stop, asked=asked)
            seen[became] += 1
            bridged = became.startswith("exact")


def _turns(conversation: Sequence[Message]) -> Iterator[tuple[int, list[Message], list[Message]]]:
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], len(conversation)], strict=True)):
        yield number, [*conversation[: turn + 1]], [*conversation[turn + 1 : following]]


def _asks(bridger: Bridger, messages: list[Message]) -> bool:
    try:
        bridger.prompt_text(messages, TOOLS)
    except Unbridgeable:
        return False
    return True


def _check(
    renderer: Renderer,
    tokenizer: ByteTokenizer,
    bridger: Bridger,
    number: int,
    history: list[Message],
    new: list[Message],
    stop: int,
    *,
    asked: bool,
) -> str:
    try:
        whole = renderer.render([*history, *new], tools=TOOLS)
        prompt = renderer.render(history[:-1], tools=TOOLS)
    except TemplateRaised:
        return "raises"
    try:
        turn = renderer.render(history, tools=TOOLS, generation_prompt=False)
    except TemplateRaised:  # many templates raise for calls without results
        turn = whole
    said, _, rest = turn.removeprefix(prompt).partition(STOP) if turn.startswith(prompt) else ("a", "", "")
    calls_after_stop = "add" not in said if turn is whole else STOP in rest or "add" in rest
    if history[-1].get("tool_calls") and calls_after_stop:
        return "calls after the stop"  # a sampled turn could not have them there
    sampled = [*tokenizer.encode(said), stop]
    try:
        bridge = bridger.bridge(history, new, TOOLS, sampled=sampled, stop=stop, turn=number)
    except Unbridgeable as refusal:
        return str(refusal.property)
    text = tokenizer.decode(bridge.ids)
    if not whole.endswith(text):
        raise WrongBridge(f"{text!r} is appended, where the template writes {whole[-len(text) - 20 :]!r}")
    before = prompt + said + STOP
    # If the rest contains further turns, the words may belong to an earlier turn that the prompt did not show.
    earlier = {str(message.get("content")).strip() for message in history[:-1] if message["role"] == "assistant"}
    same = asked and whole.startswith(before) and not (STOP in rest and said.strip() in earlier)
    if same and whole.removeprefix(before) != text:
        raise WrongBridge(f"{text!r} is appended, where the template writes {whole.removeprefix(before)!r}")
    return "exact" if same else "exact, with the past as it was sampled"


ANY_SIZE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def look_at_new_templates(minutes: float, first: int = 0) -> Counter[str]:
    """Check new templates for these minutes of processor time, and return the number of turns by result.

    Args: minutes: processor time after which no further round of templates begins. first: the seed of the first round;
    each further round has the next one.

    Raises:
        WrongBridge: a bridge is not exact.
    """
    until, seen, templates, number = time.process_time() + 60 * minutes, Counter[str](), 0, first
    # Reducing a case takes minutes, and the first case found is mostly small enough.
    phases = [Phase.generate]
    while time.process_time() < until:

        @seed(number)
        @settings(max_examples=500, deadline=None, database=None, suppress_health_check=ANY_SIZE, phases=phases)
        @given(written())
        def look(case: Written) -> None:
            nonlocal templates
            templates += 1
            check_bridges(case, seen)

        print("seed", number, flush=True)
        look()
        number += 1
        print(templates, "templates", dict(seen), flush=True)
    return seen


if __name__ == "__main__":
    minutes, *first_seed = sys.argv[1:] or ["1"]
    look_at_new_templates(float(minutes), *map(int, first_seed))
