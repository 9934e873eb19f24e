"""Grammar compiler over xgrammar that compiles each grammar with token ids separately.

xgrammar caches token masks by the shape of a rule and ignores the token ids in it. So a grammar could receive the
masks of another grammar with other ids (seen with xgrammar 0.2.8).
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

__all__ = ["TokenGrammarCompiler", "holds_token_ids"]

CACHE_ENTRIES: Final = 64
"""Number of cached grammars with token ids. A run has few such grammars, each of at most a few megabytes."""


class TokenGrammarCompiler:
    """Compiler that handles token ids correctly. All other grammars are passed to the wrapped xgrammar compiler."""

    def __init__(self, compiler: Any) -> None:
        """Wrap xgrammar's own `compiler`, which still compiles all grammars without token ids."""
        from xgrammar import GrammarCompiler

        self._compiler = compiler
        # The only way to get the compiler's vocabulary is to compile a grammar.
        vocabulary = compiler.compile_grammar('root ::= ""').tokenizer_info
        alone = GrammarCompiler(vocabulary, cache_enabled=False)
        self._grammar = functools.lru_cache(CACHE_ENTRIES)(alone.compile_grammar)
        self._structural_tag = functools.lru_cache(CACHE_ENTRIES)(alone.compile_structural_tag)

    def compile_grammar(self, grammar: Any, **given: Any) -> Any:
        """Compile a grammar, given as EBNF text or in another form that xgrammar takes."""
        if not given and holds_token_ids(grammar):
            return self._grammar(grammar)
        return self._compiler.compile_grammar(grammar, **given)

    def compile_structural_tag(self, tag: Any, *more: Any) -> Any:
        """Compile a structural tag, given as JSON text or in another form that xgrammar takes."""
        if not more and holds_token_ids(tag):
            return self._structural_tag(tag)
        return self._compiler.compile_structural_tag(tag, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)


def holds_token_ids(grammar: Any) -> bool:
    """Return whether a grammar or a structural tag contains token ids."""
    return isinstance(grammar, str) and _TOKEN_ID.search(grammar) is not None


_TOKEN_ID: Final = re.compile(r'Token\(|"(?:any_tokens|exclude_token|token|token_dispatch|token_triggered_tags)"')
