"""Templates and episodes for the tests of kept histories."""

from __future__ import annotations

from runner import Conversation
from runner.tokens.template import ChatTemplate
from tests.playing import Plain, twice

OPENER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# An assistant turn before the last message is written differently, as in templates that remove earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ '(said) ' if m.role == 'assistant' and not loop.last }}{{ m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    + OPENER
)
# The template changes the text of every assistant turn, so a sentinel in it cannot be found.
HIDDEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content | upper if m.role == 'assistant' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}" + OPENER
)


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, name="inline")


class Twice(Plain):
    """Environment whose agent speaks, is asked another question, and speaks again."""

    async def rollout(self, conversation: Conversation) -> None:
        await twice(conversation)


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
# From the sixth question on, the template writes another word. No probe has a history with so many questions.
COUNTING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if users | length > 5 and add_generation_prompt %}{{ '(long)' }}{% endif %}" + OPENER
)
