"""Runs inside vLLM's engine cores: grammars that hold ids of tokens are compiled each alone, turns can be set aside."""

from __future__ import annotations

import functools
import logging
from typing import Any

from runner.engines.vllm.worker import parent_watch
from runner.engines.vllm.worker.turn_hold import add_turn_hold
from runner.parsing.grammar_compiler import TokenGrammarCompiler

__all__ = ["ENTRY_POINT", "patch_engine_core", "patch_grammar_compiler"]

ENTRY_POINT = "deltarunner_grammars"
"""The name under which vLLM knows `patch_engine_core`."""


def patch_engine_core() -> None:
    """Mend how this process compiles grammars, if it is one of an engine of ours."""
    if not parent_watch.started_by_engine():
        return
    try:
        add_turn_hold()
        patch_grammar_compiler()
    except (ImportError, AttributeError) as error:  # another vLLM
        logging.getLogger("vllm").warning("deltarunner cannot compile this vLLM's grammars alone: %s", error)


def patch_grammar_compiler() -> None:
    """From now on vLLM's xgrammar backend in this process has such a compiler."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    begin = XgrammarBackend.__post_init__
    if hasattr(begin, "compiles_alone"):
        return

    @functools.wraps(begin)
    def patched(backend: Any) -> None:
        begin(backend)
        backend.compiler = TokenGrammarCompiler(backend.compiler)

    vars(patched)["compiles_alone"] = True
    XgrammarBackend.__post_init__ = patched
