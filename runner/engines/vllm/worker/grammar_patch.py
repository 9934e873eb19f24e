"""Patches of vLLM's engine cores: separate compilation of grammars with token ids, and calls that hold turns."""

from __future__ import annotations

import functools
import logging
from typing import Any

from runner.engines.vllm.worker import parent_watch
from runner.engines.vllm.worker.turn_hold import patch_engine_core_calls
from runner.parsing.grammar_compiler import TokenGrammarCompiler

__all__ = ["ENTRY_POINT", "patch_engine_core", "patch_grammar_compiler"]

ENTRY_POINT = "deltarunner_grammars"
"""Name of the entry point through which vLLM calls `patch_engine_core`."""


def patch_engine_core() -> None:
    """Patch an engine core that our engine started; called by vLLM through an entry point."""
    if not parent_watch.started_by_engine():
        return
    for patch, patched in (
        (patch_engine_core_calls, "engine cores to hold turns"),
        (patch_grammar_compiler, "grammar compiler"),
    ):
        try:
            patch()
        except (ImportError, AttributeError) as error:  # another version of vLLM
            logging.getLogger("vllm").warning("deltarunner cannot patch this vLLM's %s: %s", patched, error)


def patch_grammar_compiler() -> None:
    """Patch vLLM's xgrammar backend in this process to use `TokenGrammarCompiler`."""
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
