"""Templates and episodes that the tests of kept pasts share."""

from __future__ import annotations

from runner import Conversation
from runner.tokens.template import ChatTemplate
from tests.playing import Plain, twice

OPENER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# The turn before the last is written in another way, as by templates that strip what was thought.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ '(said) ' if m.role == 'assistant' and not loop.last }}{{ m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    + OPENER
)
# The last turn's words are shown before it and nowhere else, so that no sentinel can be found where they end.
HIDDEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content | upper if m.role == 'assistant' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}" + OPENER
)


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, name="inline")


class Twice(Plain):
    """Speaks, is asked something more, and speaks again."""

    async def rollout(self, conversation: Conversation) -> None:
        await twice(conversation)


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
# From the fifth message on another word follows every turn: no probe has so long a history of only questions.
COUNTING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if users | length > 5 and add_generation_prompt %}{{ '(long)' }}{% endif %}" + OPENER
)
