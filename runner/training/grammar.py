"""Token masks of constrained turns: the ids that a grammar allowed at each position, as in the engine.

An engine sets the logits of ids outside of the grammar to minus infinity before the temperature, so its
log-probabilities cover only the remaining ids. A trainer has to apply the same masks at each position.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from runner import models
from runner.errors import BadBatch, BadInput, BadModel, BadOption, first_line
from runner.options import Constraint, ConstraintKind
from runner.parsing.grammar_compiler import TokenGrammarCompiler
from runner.training.token_masks import UNCONSTRAINED_INDEX, WORD_BITS, MaskTable, RecordedMasks
from runner.trajectory import Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GrammarMasks"]

_MASKED = "processed_logprobs"  # log-probabilities after mask and temperature
_CACHE_BYTES = 512 << 20  # size of the cache of compiled grammars, as in vLLM


class GrammarMasks(RecordedMasks):
    """Token masks of constrained turns, computed by the same library and settings as in vLLM.

    A turn that does not fit its grammar, or a constraint that cannot be compiled, raises `BadBatch`. If an engine
    returned sampling masks, these are used instead.

    Args:
        model: the engine's model: a folder, a Hugging Face id or the demo model's name; or an
            `xgrammar.TokenizerInfo`, which needs `stop_ids`.
        vocabulary: number of logits, `VllmEngine.vocabulary`; by default the `vocab_size` of the model's config.json.
        stop_ids: ids that end a turn, besides the model's own ids and the ids in the turn's `Sampling`.
        any_whitespace: allow any whitespace between the tokens of JSON; False for an engine with
            `disable_any_whitespace`.

    Raises:
        BadModel: the model does not exist, or its vocabulary cannot be read.
        BadInput: xgrammar is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any = models.DEMO_MODEL,
        *,
        vocabulary: int | None = None,
        stop_ids: Iterable[int] = (),
        any_whitespace: bool = True,
    ) -> None:
        self._xgrammar = _xgrammar()
        if isinstance(model, str | os.PathLike):
            tokenizer, own = _tokenizer_info(self._xgrammar, model, vocabulary)
        else:
            tokenizer, own = model, frozenset[int]()
        super().__init__(tokenizer.vocab_size)
        self.stop_ids = own | frozenset(stop_ids)
        """Ids that end a turn, besides the ids in the turn's `Sampling`."""
        self._any_whitespace = any_whitespace
        self._compiler = TokenGrammarCompiler(self._xgrammar.GrammarCompiler(tokenizer, cache_limit_bytes=_CACHE_BYTES))

    @classmethod
    def of_engine(cls, engine: Any) -> Self:
        """Create the masks for the turns of an entered `VllmEngine`.

        Raises:
            BadOption: the engine enforces no constraints, uses another library than xgrammar, or does not record
                log-probabilities after mask and temperature.
        """
        given = getattr(engine, "given", None)
        if given is None or not hasattr(engine, "vocabulary"):
            raise BadOption(f"{type(engine).__name__} has no token masks: give a VllmEngine that was entered.")
        mode = given.get("logprobs_mode", _MASKED)
        if mode != _MASKED:
            raise BadOption(
                f"VllmEngine(logprobs_mode={mode!r}): the log-probabilities are then not recorded after mask "
                f"and temperature, so no ratio is exact. Leave it out: {_MASKED!r} is the default."
            )
        any_whitespace = _any_whitespace(
            given.get("structured_outputs_config", {"backend": "xgrammar"}), given.get("reasoning_parser")
        )
        return cls(engine.model, vocabulary=engine.vocabulary, stop_ids=engine.stop_ids, any_whitespace=any_whitespace)

    def _turn_index(self, turn: Turn, table: MaskTable, name: str) -> NDArray[np.int32] | None:
        if turn.sampling_masks is not None or turn.constraint is None:
            return super()._turn_index(turn, table, name)
        return self._walk(turn, table, name)

    def _walk(self, turn: Turn, table: MaskTable, name: str) -> NDArray[np.int32]:
        """Advance the grammar by the sampled ids, and return the index of the mask before each id."""
        assert turn.constraint is not None
        matcher = self._matcher(turn, name)
        index = np.full(turn.end - turn.start, UNCONSTRAINED_INDEX, dtype=np.int32)
        mask = np.full((1, table.words), -1, dtype=np.int32)
        for position, token_id in enumerate(turn.token_ids):
            # The turn continues after an id that ended the grammar. As in vLLM, all later ids are allowed.
            if matcher.is_terminated():
                break
            # False means that every id is allowed, and the mask was not written.
            if matcher.fill_next_token_bitmask(mask):
                index[position] = table.add(mask)
            else:
                mask.fill(-1)
            # Check the mask first, since the matcher prints a line about each id that it refuses.
            allowed = 0 <= token_id < self.vocabulary and mask[0, token_id // WORD_BITS] >> token_id % WORD_BITS & 1
            if not allowed or not matcher.accept_token(token_id):
                raise BadBatch(_misfit(turn.constraint, name, position, token_id))
        return index

    def _matcher(self, turn: Turn, name: str) -> Any:
        assert turn.constraint is not None
        try:
            compiled = self._compiled(turn.constraint)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:  # xgrammar and malformed values raise these
            raise BadBatch(
                f"{name}: its {turn.constraint.kind.value} constraint cannot be compiled ({_without_place(error)}). "
                "If it was written by hand, or not enforced by xgrammar, leave the turn out."
            ) from error
        stop_ids = self.stop_ids.union(turn.sampling.stop_ids if turn.sampling is not None else ())
        return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stop_ids) or None)

    def _compiled(self, constraint: Constraint) -> Any:
        """Compile the grammar as vLLM's xgrammar backend does; the compiler caches it."""
        compiler, value = self._compiler, constraint.value
        match constraint.kind:
            case ConstraintKind.JSON:
                separators = None if self._any_whitespace else (",", ":")
                return compiler.compile_json_schema(value, any_whitespace=self._any_whitespace, separators=separators)
            case ConstraintKind.REGEX:
                return compiler.compile_regex(value)
            # vLLM's functions for choices and Lark are copied below: vLLM imports torch and may not be installed.
            case ConstraintKind.CHOICE:
                return compiler.compile_grammar(_choice_grammar(json.loads(value)))
            case ConstraintKind.GRAMMAR:
                return compiler.compile_lark(value) if _is_lark(value) else compiler.compile_grammar(value)
            case ConstraintKind.STRUCTURAL_TAG:
                return self._structural_tag(json.loads(value), value)

    def _structural_tag(self, tag: Mapping[str, Any], text: str) -> Any:
        # The older form of a structural tag, which vLLM still supports, has "structures".
        if "structures" not in tag:
            return self._compiler.compile_structural_tag(text)
        items = [
            self._xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
            for item in tag["structures"]
        ]
        return self._compiler.compile_structural_tag(items, tag["triggers"])


def _misfit(constraint: Constraint, name: str, position: int, token_id: int) -> str:
    return (
        f"{name}: its {constraint.kind.value} constraint does not allow id {token_id}, the turn's sampled id number "
        f"{position} from 0. The turn was sampled with another vocabulary, other stop ids or another version of the "
        "grammar's library: give GrammarMasks the model that sampled it and its stop ids, or leave the turn out."
    )


def _any_whitespace(config: Any, reasoning_parser: str | None) -> bool:
    """Return True if an engine allows any whitespace in JSON.

    Raises:
        BadOption: with these settings, the masks are unknown.
    """

    def setting(name: str, default: Any) -> Any:
        return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)

    if (reasoning_parser or setting("reasoning_parser", "")) and not setting("enable_in_reasoning", False):
        raise BadOption(
            "VllmEngine(reasoning_parser=...): the grammar then begins somewhere inside the turn. Leave it out: "
            "reasoning is separated without it."
        )
    backend = setting("backend", "auto")
    if backend != "xgrammar":
        raise BadOption(
            f"VllmEngine(structured_outputs_config=...): with backend={backend!r} the ids that a grammar "
            "allowed are unknown. Give backend='xgrammar'."
        )
    return not setting("disable_any_whitespace", False)


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise BadInput(
            f"token masks of grammars need xgrammar ({error}): pip install 'deltarunner[grammars]'"
        ) from error
    return xgrammar


def _tokenizer_info(xgrammar: Any, model: str | os.PathLike[str], vocabulary: int | None) -> tuple[Any, frozenset[int]]:
    """Return the vocabulary as vLLM passes it to xgrammar, and the model's stop ids."""
    resolved = models.resolve_model(model)
    size = vocabulary or _logits(resolved.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and its libraries warn about themselves
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(resolved.folder)
        except (OSError, ValueError) as error:
            raise BadModel(f"the tokenizer of {resolved.name!r} cannot be loaded: {_without_place(error)}") from error
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    return info, frozenset(models.stop_ids(resolved, tokenizer.eos_token_id))


def _logits(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise BadModel(f"{folder / 'config.json'} has no vocab_size: give GrammarMasks(vocabulary=...).")
    return size


def _choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar that vLLM builds for a choice between texts, in xgrammar's form."""
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\u{ord(character):04x}" if character < " " or character == "\x7f" else character


_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _is_lark(grammar: str) -> bool:
    """Return True if vLLM treats a grammar as Lark: no line besides comments defines a rule by "::="."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in grammar.split("\n"))
    return bool(grammar) and not any("::=" in line for line in lines)


def _without_place(error: Exception) -> str:
    """Return the text of an error of xgrammar without its time and source position."""
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", first_line(error))
