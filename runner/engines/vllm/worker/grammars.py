"""Runs inside vLLM's engine cores: grammars that hold ids of tokens are compiled each alone, turns can be set aside."""

from __future__ import annotations

import functools
import logging
from typing import Any

from runner.engines.vllm.worker import parent_watch
from runner.engines.vllm.worker.set_aside import add_set_aside
from runner.parsing.grammar_compiler import TokenGrammarCompiler

__all__ = ["ENTRY_POINT", "compile_alone", "mend_grammars"]

ENTRY_POINT = "deltarunner_grammars"
"""The name under which vLLM knows `compile_alone`."""


def compile_alone() -> None:
    """Mend how this process compiles grammars, if it is one of an engine of ours."""
    if not parent_watch.of_an_engine():
        return
    try:
        add_set_aside()
        mend_grammars()
    except (ImportError, AttributeError) as error:  # another vLLM
        logging.getLogger("vllm").warning("deltarunner cannot compile this vLLM's grammars alone: %s", error)


def mend_grammars() -> None:
    """From now on vLLM's xgrammar backend in this process has such a compiler."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    begin = XgrammarBackend.__post_init__
    if hasattr(begin, "compiles_alone"):
        return

    @functools.wraps(begin)
    def mended(backend: Any) -> None:
        begin(backend)
        backend.compiler = TokenGrammarCompiler(backend.compiler)

    vars(mended)["compiles_alone"] = True
    XgrammarBackend.__post_init__ = mended
