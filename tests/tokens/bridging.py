"""Messages, templates and bridges that tests of the bridge share."""

from collections.abc import Sequence
from typing import Any

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridge, Bridger
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.junction import Result
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

QUESTION: Message = {"role": "user", "content": "What is 17 + 25?"}
MORE: Message = {"role": "user", "content": "And twice that?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}


def says(content: str, *calls: dict[str, Any], reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{index:05}", "type": "function", "function": {"name": "add", "arguments": arguments}}
            for index, arguments in enumerate(calls)
        ]
    return message


def result(content: str, index: int = 0) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call{index:05}", "name": "add"}


def chatml(close: str = "<|im_end|>\n", body: str = "{{ m.content }}") -> str:
    return (
        f"{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{body}{{{{ {close!r} }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def bridger(text: str, tokenizer: Tokenizer | None = None, stops: Sequence[str] = ("<|im_end|>",)) -> Bridger:
    tokenizer = tokenizer or ByteTokenizer()
    ids = [tokenizer.encode(stop)[0] for stop in stops]
    return Bridger(tokenizer, ChatTemplate(text, name="inline").renderer(), ids)


def answer(
    made: Bridger, said: str, stop: str | None, last: Message, *new: Message, history: Sequence[Message] = (QUESTION,)
) -> tuple[str, Bridge]:
    """Return the bridge after the model sampled `said` and then `stop`, and the text of the bridge."""
    stop_id = made.tokenizer.token_id(stop) if stop is not None else None
    sampled = made.tokenizer.encode(said) + ([stop_id] if stop_id is not None else [])
    bridge = made.bridge([*history, last], new, [ADD], sampled=sampled, stop=stop_id)
    assert bridge.junction.inserted == len(bridge.ids)
    assert bridge.junction.result is Result.APPENDED
    return made.tokenizer.decode(bridge.ids), bridge
