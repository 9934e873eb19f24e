"""Compiles grammars with xgrammar, and each that holds ids of tokens alone.

xgrammar keeps the masks of a rule by its shape, in which ids of tokens do not count: what one grammar lets through was
let through by another with other ids (seen with xgrammar 0.2.8).
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

__all__ = ["TokenGrammarCompiler", "holds_token_ids"]

KEPT: Final = 64
"""Grammars with ids of tokens that are kept; a run has few of them, and each takes some megabytes at most."""


class TokenGrammarCompiler:
    """An xgrammar compiler for any grammar; what it does not do itself is done by the compiler it was made of."""

    def __init__(self, compiler: Any) -> None:
        """Over xgrammar's own `compiler`, which goes on with all grammars that hold no ids of tokens."""
        from xgrammar import GrammarCompiler

        self._compiler = compiler
        vocabulary = compiler.compile_grammar('root ::= ""').tokenizer_info  # it does not say itself
        alone = GrammarCompiler(vocabulary, cache_enabled=False)
        self._grammar = functools.lru_cache(KEPT)(alone.compile_grammar)
        self._structural_tag = functools.lru_cache(KEPT)(alone.compile_structural_tag)

    def compile_grammar(self, grammar: Any, **given: Any) -> Any:
        """A compiled grammar, of its text in EBNF or what else xgrammar takes."""
        if not given and holds_token_ids(grammar):
            return self._grammar(grammar)
        return self._compiler.compile_grammar(grammar, **given)

    def compile_structural_tag(self, tag: Any, *more: Any) -> Any:
        """A compiled grammar, of a structural tag in JSON or what else xgrammar takes."""
        if not more and holds_token_ids(tag):
            return self._structural_tag(tag)
        return self._compiler.compile_structural_tag(tag, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)


def holds_token_ids(grammar: Any) -> bool:
    """Whether ids of tokens stand in the text of a grammar or a structural tag."""
    return isinstance(grammar, str) and _TOKEN_ID.search(grammar) is not None


_TOKEN_ID: Final = re.compile(r'Token\(|"(?:any_tokens|exclude_token|token|token_dispatch|token_triggered_tags)"')
