"""A chat model: an engine together with the template, the bridge and the tool format that a run uses with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from runner.engines.base import Engine, FinishReason
from runner.messages import Message
from runner.options import History
from runner.parsing.base import ToolFormat
from runner.parsing.detect import detect_format
from runner.parsing.reasoning import OPEN as REASONING_OPEN
from runner.tokens.bridging.bridge import Bridge, Bridger
from runner.tokens.bridging.tail import Tail
from runner.tokens.template import Renderer
from runner.tokens.tool_support import require_tools
from runner.trajectory import Turn

__all__ = ["ChatModel"]


class ChatModel:
    """Speaks for one or more agents of a run.

    Attributes:
        engine: where its tokens are sampled.
        renderer: the engine's template, with the run's options and frozen clock.
        bridger: makes the ids of appended messages.
        tool_format: how it writes tool calls; None where its template carries none that we know.
        stop_ids: ids that end its turns.
        history: how the past is kept.
        opens_reasoning: its prompt ends inside a reasoning block, so that a turn begins with a thought.
    """

    def __init__(
        self, engine: Engine, *, options: Mapping[str, Any], now: datetime, history: History | None = None
    ) -> None:
        self.engine = engine
        self.history = history or History()
        self.tokenizer = engine.tokenizer
        self.renderer: Renderer = engine.template.renderer(options=options, now=now)
        self.stop_ids = tuple(engine.stop_ids)
        self.bridger = self.trial_bridger()
        self.tokenizer = self.bridger.tokenizer
        self.tool_format: ToolFormat | None = detect_format(self._render_probe)
        prompt = self.renderer.render([{"role": "user", "content": "Go on."}])
        self.opens_reasoning = prompt.rstrip().endswith(REASONING_OPEN)

    def trial_bridger(self) -> Bridger:
        """A bridger that knows nothing yet."""
        return Bridger(
            self.tokenizer,
            self.renderer,
            self.stop_ids,
            content_safe=self.history.content_safe,
            close_reasoning=self.history.close_reasoning,
        )

    def closing_stop(self, turn: Turn) -> int | None:
        """The sampled id that closed a turn, or None where it was cut.

        A stop string, or a stop id of the author's own, closes no turn of the template: such a turn is cut.
        """
        if turn.finish is FinishReason.STOP and isinstance(turn.stop, int) and turn.stop in self.stop_ids:
            return turn.stop
        return None

    def bridge(self, turn: Turn, tail: Tail) -> Bridge:
        """The bridge from a turn to what answers it.

        Raises:
            Unbridgeable: there is none that is exact.
        """
        return self.bridger.join(tail, sampled=turn.token_ids, stop=self.closing_stop(turn), thinking=turn.thinking)

    def require_tools(self) -> None:
        """Refuse an engine whose template cannot carry tools.

        Raises:
            BadTemplate: names the missing property and the fix.
        """
        require_tools(self.renderer)

    def _render_probe(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        return self.renderer.render(messages, tools=tools, generation_prompt=False)
