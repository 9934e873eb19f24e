"""A compiled grammar does not depend on the grammars that were compiled before it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from runner.parsing.grammar_compiler import TokenGrammarCompiler, holds_token_ids

VOCABULARY_SIZE = 60
VOCABULARY = [bytes([97 + index % 26]) * (1 + index // 26) for index in range(VOCABULARY_SIZE)]


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


GRAMMARS = {
    "an id": lambda token_id: f'root ::= Token({token_id}) "b"',
    "all but an id": lambda token_id: f'root ::= ExcludeToken({token_id})* "b"',
    "a tag of all but an id": lambda token_id: tag({"type": "any_tokens", "exclude_tokens": [token_id]}),
}


def own() -> Any:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*VOCABULARY, b""], stop_token_ids=[VOCABULARY_SIZE]))


def let_through(compiler: Any, grammar: str) -> set[int]:
    compile_it = compiler.compile_structural_tag if grammar.startswith("{") else compiler.compile_grammar
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY_SIZE + 1)
    xgrammar.GrammarMatcher(compile_it(grammar)).fill_next_token_bitmask(mask)
    return {index for index in range(VOCABULARY_SIZE + 1) if int(mask[0, index // 32]) >> (index % 32) & 1}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_only_differ_in_ids_stay_separate(name: str) -> None:
    compiler = TokenGrammarCompiler(own())
    for token_id in (5, 6, 7, 5):
        grammar = GRAMMARS[name](token_id)
        assert holds_token_ids(grammar)
        assert let_through(compiler, grammar) == let_through(own(), grammar)


def test_unpatched_xgrammar_confuses_such_grammars() -> None:
    compiler = own()
    first, second = (let_through(compiler, GRAMMARS["an id"](token_id)) for token_id in (5, 6))
    assert first == second, "it is fixed upstream: remove our patch"


def test_compiled_grammar_is_cached() -> None:
    compiler = TokenGrammarCompiler(own())
    for grammar in ('root ::= Token(5) "b"', 'root ::= "ab"'):
        first, second = compiler.compile_grammar(grammar), compiler.compile_grammar(grammar)
        assert first.memory_size_bytes == second.memory_size_bytes
    assert compiler.compile_grammar('root ::= Token(5) "b"') is compiler.compile_grammar('root ::= Token(5) "b"')


def test_grammars_without_ids_are_compiled_by_xgrammar() -> None:
    compiler = TokenGrammarCompiler(own())
    assert not holds_token_ids('root ::= "Token" "(5)"')
    assert let_through(compiler, 'root ::= "b" | "c"') == {1, 2}
    assert let_through(compiler, tag({"type": "const_string", "value": "b"})) == {1}
    assert compiler.compile_regex("[bc]") is not None


def test_vllm_backend_uses_the_compiler_in_our_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = pytest.importorskip("vllm.v1.structured_output.backend_xgrammar")
    from runner.engines.vllm.worker.grammar_patch import patch_grammar_compiler

    def plain(backend: Any) -> None:
        backend.compiler = own()

    monkeypatch.setattr(backends.XgrammarBackend, "__post_init__", plain)
    patch_grammar_compiler()
    mended = backends.XgrammarBackend.__post_init__
    patch_grammar_compiler()
    assert backends.XgrammarBackend.__post_init__ is mended
    backend = object.__new__(backends.XgrammarBackend)
    mended(backend)
    assert isinstance(backend.compiler, TokenGrammarCompiler)
