"""Comparison of a tool format that the user named with the calls that a chat template writes, for `check-template`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.cli.quiet_output import quiet_output
from runner.models import ResolvedModel
from runner.options import check_tool_format
from runner.parsing.call_reader import Schemas
from runner.parsing.events import TurnReading
from runner.parsing.learning.calls import find_form
from runner.parsing.learning.learnt_format import LearntFormat, prober_of
from runner.parsing.learning.probe_renders import UnlearnableFormat
from runner.parsing.learning.reader_check import ReaderCheck, check_reader
from runner.parsing.limitations import DESCRIPTIONS
from runner.parsing.parser import TurnParser
from runner.tokens.probing.appends import byte_tokenizer
from runner.tokens.probing.profile import TemplateProfile
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer, for_template, load_tokenizer

__all__ = ["ToolFormatCheck"]


@dataclass(frozen=True, slots=True)
class ToolFormatCheck:
    """Result of parsing a template's calls with a named tool format."""

    name: str
    """Name of the format, as users write it."""
    checked: ReaderCheck | None
    """Result of the test cases; None if the template writes no calls."""

    @classmethod
    def tried(
        cls,
        name: str,
        template: ChatTemplate,
        options: Mapping[str, Any],
        model: ResolvedModel | None,
        profile: TemplateProfile,
        learnt: LearntFormat,
    ) -> ToolFormatCheck:
        """Check the format in this process. Before this call, a probe must show that the template can be rendered.

        Raises:
            BadOption: the format does not exist, or does not work with the vocabulary.
            BadModel: vLLM is not installed.
        """
        from runner.engines.vllm.call_reader import named_reader

        check_tool_format(name)
        renderer = template.renderer(options, datetime.now())
        vocabulary: Tokenizer = byte_tokenizer(renderer, profile) if model is None else load_tokenizer(model.folder)
        tokenizer = for_template(vocabulary, renderer.written)
        with quiet_output(Path(os.devnull)):  # vLLM prints during its import
            parser = TurnParser(learnt.format, named=named_reader(name, tokenizer))
        prober = prober_of(renderer)
        try:
            find_form(prober)
        except UnlearnableFormat:
            return cls(name, None)

        def read(text: str, schemas: Schemas) -> TurnReading:
            return parser.read_named(text, schemas, tokenizer.encode(text))

        return cls(name, check_reader(prober, read, learnt.format.reasoning))

    @property
    def reads_all(self) -> bool:
        """True if the format reads all cases, apart from known limitations; False if the template writes no calls."""
        return self.checked is not None and not self.checked.differences

    @property
    def misreads(self) -> str:
        """A clause about calls that are misread or cannot be checked; "" if all are read."""
        if self.checked is None:
            return "no call can be checked: the template writes none"
        if not self.checked.differences:
            return ""
        first, wrong = self.checked.differences[0], len(self.checked.differences)
        return f"{wrong} of {self.checked.cases} kinds of call are misread; {first.case.what}: {first.why}"

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(label, text, explanation) of each line about the format."""
        yield "tool format", self.name, f"Parses calls instead of the learnt format. {self.misreads or _ALL}."
        for limit in sorted(self.checked.limitations) if self.checked is not None else ():
            yield f"  {limit}", "", DESCRIPTIONS[limit]

    def document(self) -> dict[str, Any]:
        checked = self.checked
        return {
            "name": self.name,
            "cases": checked.cases if checked else 0,
            "misread": [{"case": each.case.what, "why": each.why} for each in checked.differences] if checked else [],
            "limitations": {limit: DESCRIPTIONS[limit] for limit in sorted(checked.limitations)} if checked else {},
        }


_ALL = "It reads all calls that the template writes"
