"""Token masks of constrained turns: the allowed ids at each position, stored once, and equal to vLLM's masks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from runner import Trajectory
from runner.engines.vllm.settings import constraint_arguments
from runner.errors import BadBatch, BadModel
from runner.messages import ToolCall
from runner.options import Constraint, ConstraintKind, Sampling
from runner.parsing.call_grammar import constraint as constraint_of_calls
from runner.parsing.call_writer import WrittenCall, write_calls
from runner.parsing.parser import TurnParser
from runner.parsing.turn_format import ReasoningFormat
from runner.tokens.tokenizer import load_tokenizer
from runner.tools.tool import Tool
from runner.training import grammar as module
from runner.training.batch import TrainingBatch
from runner.training.grammar import GrammarMasks
from runner.training.rows import TrainingRow, rows_of, version_table
from runner.training.token_masks import UNCONSTRAINED_INDEX, TokenMasks
from runner.training.tree import TokenTree
from tests.parsing.learnt_formats import CLASSES, learnt
from tests.parsing.parsers import bundled
from tests.training.making import made, prompt, retried, said

pytestmark = pytest.mark.sample_cases(3)

START, STOP, OTHER_STOP, SPECIAL = 256, 257, 258, 259
VOCABULARY_SIZE = 270  # bytes, the ids above, and padding rows of a model; not a multiple of 32


@lru_cache
def bytewise(*, any_whitespace: bool = True) -> GrammarMasks:
    """Return masks over a vocabulary of bytes."""
    names = [*(bytes([byte]) for byte in range(256)), b"", b"", b"", b""]
    tokenizer = xgrammar.TokenizerInfo(names, vocab_size=VOCABULARY_SIZE, stop_token_ids=[STOP])
    return GrammarMasks(tokenizer, stop_ids=[STOP], any_whitespace=any_whitespace)


def constrained(trajectory: Trajectory, constraint: Constraint | None) -> Trajectory:
    for turn in trajectory.turns:
        turn.constraint = constraint
    return trajectory


def row_of(trajectory: Trajectory) -> TrainingRow:
    (row,) = rows_of(trajectory, version_table([trajectory]))
    return row


def spoken(text: str, constraint: Constraint, **fields: Any) -> Trajectory:
    return constrained(made([prompt(START), said(*text.encode(), STOP)], **fields), constraint)


def masks_of(text: str, constraint: Constraint) -> TokenMasks:
    masks = bytewise().masks_of(spoken(text, constraint).turns[0])
    assert masks is not None
    return masks


def written(mask: Sequence[bool]) -> str:
    """Return the texts that a mask allows; "$" is the stop id."""
    return "".join("$" if token_id == STOP else chr(token_id) for token_id in np.flatnonzero(mask))


def constraint(kind: str, value: Any) -> Constraint:
    return Constraint(ConstraintKind(kind), value if isinstance(value, str) else json.dumps(value))


DIGITS = "0123456789"
SPACE = "\t\n\r "
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAGS = {"type": "triggered_tags", "triggers": ["<n"], "at_least_one": True, "stop_after_first": True}
TAG = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</n>"}

KINDS = {
    "json": (constraint("json", {"enum": [7, "ab"]}), '"ab"', ['"7', "a", "b", '"', "$"]),
    "regex": (constraint("regex", "a[bc]+d?"), "abcd", ["a", "bc", "bcd$", "bcd$", "$"]),
    "grammar": (constraint("grammar", 'root ::= "x" n | "y"\nn ::= [0-9]{2}'), "x42", ["xy", DIGITS, DIGITS, "$"]),
    "lark": (constraint("grammar", 'start: "x" ("y" | "z")'), "xz", ["x", "yz", "$"]),
    "choice": (constraint("choice", ['no "x"', "now", "no"]), 'no "x"', ["n", "o", " w$", '"', "x", '"', "$"]),
    "structural_tag": (
        constraint("structural_tag", {"type": "structural_tag", "format": {**TAGS, "tags": [TAG]}}),
        "<n>true</n>",
        ["<", "n", ">", "ft", "r", "u", "e", "<", "/", "n", ">", "$"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_allow_continuations_and_the_final_stop_id(kind: str) -> None:
    enforced, text, expected = KINDS[kind]
    masks = masks_of(text, enforced)
    assert [written(mask) for mask in masks.unpacked()] == expected
    assert masks.forced.tolist() == [len(part) == 1 for part in expected]
    assert masks.allowed.tolist() == [len(part) for part in expected]


def test_a_legacy_structural_tag_frees_the_text_around_its_tags() -> None:
    tag = {"structures": [{"begin": "<n>", "schema": {"type": "boolean"}, "end": "</n>"}], "triggers": ["<n"]}
    masks = masks_of("so <n>true</n>!", constraint("structural_tag", tag))
    plain, inside = masks.allowed[[0, 1, 2, 3, 14, 15]], masks.allowed[6:14]
    assert plain.min() > 100
    assert inside.tolist() == [2] + [1] * 7
    assert masks.unpacked()[:, STOP].tolist() == [position < 5 or position > 13 for position in range(16)]


def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def note(text: str, tags: list[str]) -> None:
    """Note."""


TOOLS = [Tool(add), Tool(note)]
CALLS = [ToolCall("", "note", {"text": 'a "b"\n', "tags": ["x", "é"]}), ToolCall("", "add", {"a": -17, "b": 5})]
parametrize_format = pytest.mark.parametrize(
    "tool_format", [bundled("pythonic"), bundled("hermes")], ids=["pythonic", "hermes"]
)


def call_constraint(tool_format: TurnParser) -> Constraint:
    enforced = tool_format.constraint(TOOLS, "required")
    assert enforced is not None
    return enforced


@parametrize_format
def test_masks_of_tool_calls_equal_the_grammars_bytes(tool_format: TurnParser) -> None:
    enforced, text = call_constraint(tool_format), tool_format.render(CALLS).encode()
    compiled = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    ).compile_grammar(enforced.value)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)

    def accepts(byte: int) -> bool:
        taken = matcher.accept_string(bytes([byte]))
        if taken:
            matcher.rollback(1)
        return bool(taken)

    masks = bytewise().masks_of(spoken(tool_format.render(CALLS), enforced).turns[0])
    assert masks is not None
    for byte, mask in zip(text, masks.unpacked(), strict=False):
        assert [token_id for token_id in range(256) if accepts(token_id)] == np.flatnonzero(mask[:256]).tolist()
        assert mask[byte]
        assert matcher.accept_string(bytes([byte]))
    assert written(masks.unpacked()[-1]).endswith("$")


def test_masks_constrain_calls_only() -> None:
    text = f"Both at once.\n{TAGGED_CALLS} and on".encode()
    masks = bytewise().masks_of(spoken(text.decode(), tagged_constraint("auto")).turns[0])
    assert masks is not None
    begun, ended = (text.index(tag) + len(tag) for tag in (b"<tool_call>", b"</tool_call>"))
    after = text.rindex(b" and on")
    assert masks.allowed[: begun - 1].min() > 250
    assert masks.allowed[after:].min() > 250
    assert masks.forced[begun : begun + len("\n<function=")].all()
    assert not masks.unpacked()[begun:ended, STOP].any()
    assert masks.unpacked()[after:, STOP].all()


def test_stop_ids_of_the_turn_end_it_as_well_as_the_models() -> None:
    sampling = replace(Sampling.defaults(), stop_ids=(OTHER_STOP,))
    trajectory = made([prompt(START), said(*b"ab", OTHER_STOP)], sampling=sampling)
    masks = bytewise().masks_of(constrained(trajectory, constraint("regex", "ab")).turns[0])
    assert masks is not None
    assert np.flatnonzero(masks.unpacked()[2]).tolist() == [STOP, OTHER_STOP]


def test_ids_after_an_ignored_end_are_unconstrained() -> None:
    trajectory = made([prompt(START), said(*b"ab", STOP, *b"zz", SPECIAL)])
    masks = bytewise().masks_of(constrained(trajectory, constraint("regex", "ab")).turns[0])
    assert masks is not None
    assert (masks.index != UNCONSTRAINED_INDEX).tolist() == [True] * 3 + [False] * 3
    assert masks.allowed.tolist() == [1, 1, 1] + [VOCABULARY_SIZE] * 3
    assert not masks.forced[3:].any()
    assert masks.unpacked()[3:].all()


def test_a_cut_turn_has_the_masks_of_its_ids() -> None:
    trajectory = constrained(made([prompt(START), said(*b"ab")]), constraint("regex", "abc+"))
    masks = bytewise().masks_of(trajectory.turns[0])
    assert masks is not None
    assert [written(mask) for mask in masks.unpacked()] == ["a", "b"]


def test_a_turn_without_a_constraint_has_no_masks() -> None:
    trajectory = made([prompt(START), said(*b"ab", STOP)])
    assert bytewise().masks_of(trajectory.turns[0]) is None
    masks = bytewise().masks_for_row(row_of(trajectory))
    assert masks.table.shape == (0, 9)
    assert (masks.index == UNCONSTRAINED_INDEX).all()
    assert masks.allowed.tolist() == [VOCABULARY_SIZE] * 4


def test_rows_have_masks_only_at_trained_constrained_ids() -> None:
    trajectory = made([prompt(START), retried(*b"ab", STOP), said(*b"abc", STOP), prompt(*b"so?"), said(*b"z", STOP)])
    trajectory.turns[0].constraint = trajectory.turns[1].constraint = constraint("regex", "ab.*")
    masks = bytewise().masks_for_row(row_of(trajectory))
    assert masks.index.shape == (13,)
    assert np.flatnonzero(masks.index != UNCONSTRAINED_INDEX).tolist() == [4, 5, 6, 7]
    assert [written(mask) for mask in masks.take([4, 5]).unpacked()] == ["a", "b"]
    assert masks.unpacked()[np.arange(4, 8), row_of(trajectory).ids[4:8]].all()


def test_grammar_starts_again_with_every_turn() -> None:
    trajectory = made([prompt(START), said(*b"ab"), said(*b"ab", STOP)])
    masks = bytewise().masks_for_row(row_of(constrained(trajectory, constraint("regex", "ab"))))
    assert [written(mask) for mask in masks.unpacked()[1:]] == ["a", "b", "a", "b", "$"]
    assert masks.index.tolist() == [UNCONSTRAINED_INDEX, 0, 1, 0, 1, 2]


def three_rows() -> list[TrainingRow]:
    values = {"t0#0": "12", "t0#1": "345", "t0#2": "12"}
    enforced = constraint("regex", "[0-9]+")
    return [row_of(spoken(text, enforced, id=name)) for name, text in values.items()]


def test_rows_share_one_table_with_each_mask_once() -> None:
    first, second, third = bytewise().masks_for_rows(three_rows())
    assert first.table is second.table
    assert [written(mask) for mask in TokenMasks(first.table, np.arange(2), VOCABULARY_SIZE).unpacked()] == [
        DIGITS,
        f"{DIGITS}$",
    ]
    assert len(first.table) == 2
    assert first.index.tolist() == third.index.tolist() == [-1, 0, 1, 1]
    assert second.index.tolist() == [-1, 0, 1, 1, 1]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_masks_of_a_batch_stand_where_its_ids_do(packed: bool) -> None:
    trajectories = [row.trajectory for row in three_rows()]
    if packed:
        batch = TrainingBatch.packed(trajectories, pad_id=0, length=9)
    else:
        batch = TrainingBatch.padded(trajectories, pad_id=0)
    masks = bytewise().masks_for(batch.rows, batch.layout)
    assert masks.index.shape == batch.input_ids.shape
    assert ((masks.index != UNCONSTRAINED_INDEX) == batch.loss_mask).all()
    trained = masks.take(batch.loss_mask)
    assert trained.unpacked()[np.arange(batch.trained), batch.input_ids[batch.loss_mask]].all()
    for row, alone in zip(batch.unpadded(masks.index), bytewise().masks_for_rows(batch.rows), strict=True):
        assert row.tolist() == alone.index.tolist()


def test_a_batch_carries_its_masks_and_is_exact_with_them_only() -> None:
    batch = TrainingBatch.padded([row.trajectory for row in three_rows()], pad_id=0)
    assert (batch.masks, batch.exact) == (None, False)
    assert batch.inexact_reason == f"a grammar without its masks ({batch.trained} ids)"
    masked = batch.with_masks(bytewise())
    assert (masked.exact, masked.inexact_reason) == (True, "")
    assert masked.masks is not None
    assert masked.masks.index.tolist() == bytewise().masks_for(batch.rows, batch.layout).index.tolist()


def test_the_parts_of_a_batch_have_their_own_masks() -> None:
    batch = TrainingBatch.padded([row.trajectory for row in three_rows()], pad_id=0).with_masks(bytewise())
    assert batch.masks is not None
    parts = [part.masks for part in batch.torch().split(2)]
    assert [part.index.tolist() for part in parts if part is not None] == [
        batch.masks.index[:2].tolist(),
        batch.masks.index[2:].tolist(),
    ]
    assert all(part.table is batch.masks.table for part in parts if part is not None)


def test_the_masks_of_a_tree_stand_where_its_terms_do() -> None:
    rows = three_rows()
    tree = TokenTree.of(rows)
    masks = bytewise().masks_for_terms(rows, tree.terms)
    alone = bytewise().masks_for_rows(rows)
    assert masks.index.shape == tree.terms.target_id.shape
    expected = [alone[row].index[place] for row, place in zip(tree.terms.row, tree.terms.position, strict=True)]
    assert masks.index.tolist() == expected
    assert masks.unpacked()[np.arange(len(expected)), tree.terms.target_id].all()


@pytest.mark.parametrize(
    ("ids", "position", "wrong"),
    [
        ([*b"ax", STOP], 1, ord("x")),
        ([*b"a", STOP], 1, STOP),
        ([*b"abc", STOP], 2, ord("c")),
        ([SPECIAL, STOP], 0, SPECIAL),
        ([*b"ab", OTHER_STOP], 2, OTHER_STOP),
        ([*b"ab", VOCABULARY_SIZE + 4000], 2, VOCABULARY_SIZE + 4000),
    ],
    ids=["another", "too early", "too late", "control", "another stop", "no id"],
)
def test_forbidden_id_is_named_with_turn_and_position(
    ids: list[int], position: int, wrong: int, capfd: pytest.CaptureFixture[str]
) -> None:
    trajectory = constrained(made([prompt(START), said(*ids)], id="task#3"), constraint("regex", "ab"))
    message = f"its regex constraint does not allow id {wrong}, the turn's sampled id number {position} from 0"
    with pytest.raises(BadBatch, match=f"^turn main/0: {message}"):
        bytewise().masks_of(trajectory.turns[0])
    with pytest.raises(BadBatch, match=f"^task#3/main/0: {message}"):
        bytewise().masks_for_row(row_of(trajectory))
    assert capfd.readouterr().err == ""  # xgrammar printed nothing


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", '{"type":'),
        ("regex", "("),
        ("grammar", "root ::= ("),
        ("grammar", "start: ("),
        ("choice", "red"),
        ("choice", "[1]"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "none"}}'),
        ("structural_tag", '{"structures": [{}], "triggers": []}'),
        ("structural_tag", "7"),
    ],
)
def test_uncompilable_constraint_is_one_error_with_the_reason(kind: str, value: str) -> None:
    with pytest.raises(BadBatch, match=rf"^turn main/0: its {kind} constraint cannot be compiled \(.+\)\. ") as refused:
        masks_of("x", constraint(kind, value))
    assert "/project/" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_any_whitespace_json_is_compact() -> None:
    enforced = constraint("json", NUMBER)
    assert {written(mask) for mask in masks_of('{ "n"\n: 7 }', enforced).unpacked()} >= {f'{SPACE}"', f"{SPACE}:"}
    masks = bytewise(any_whitespace=False).masks_of(spoken('{"n":7}', enforced).turns[0])
    assert masks is not None
    assert not masks.unpacked()[:, list(SPACE.encode())].any()


# --- a model's vocabulary, and vLLM's own compilation


@pytest.fixture(scope="module")
def of_model(demo_model_folder: Path) -> GrammarMasks:
    return GrammarMasks(demo_model_folder)


def test_a_model_brings_its_vocabulary_and_its_stop_ids(of_model: GrammarMasks) -> None:
    assert (of_model.vocabulary, sorted(of_model.stop_ids)) == (49152, [2])


def test_a_thousand_calls_take_the_room_of_a_few_masks(of_model: GrammarMasks, demo_model_folder: Path) -> None:
    encode = load_tokenizer(demo_model_folder).encode
    enforced = call_constraint(bundled("pythonic"))
    calls = [encode(f"[add(a={first}, b={second})]") for first in range(3, 96, 3) for second in range(7, 199, 6)]
    trajectories = [made([prompt(1), said(*ids, 2)], id=f"t0#{n}") for n, ids in enumerate(calls)]
    rows = [row_of(constrained(trajectory, enforced)) for trajectory in trajectories]
    masks = of_model.masks_for_rows(rows)
    trained = sum(int((mask.index != UNCONSTRAINED_INDEX).sum()) for mask in masks)
    kept = masks[0].table.nbytes + sum(mask.index.nbytes for mask in masks)
    assert len(rows) > 900
    assert len(masks[0].table) < 20
    assert kept < trained * masks[0].table.shape[1] * 4 / 300
    assert sum(int(mask.forced.sum()) for mask in masks) > trained / 4


TAGGED = learnt(CLASSES["raw strings"])
assert TAGGED is not None
TAGGED_CALLS = write_calls(TAGGED, [WrittenCall(call.name, call.arguments, "") for call in CALLS])


OPENED = ReasoningFormat("<think>", "</think>", opened_by_prompt=True)


def tagged_constraint(tool_choice: str, thought: ReasoningFormat | None = None) -> Constraint:
    assert TAGGED is not None
    enforced = constraint_of_calls(TAGGED, TOOLS, tool_choice, thought=thought)
    assert enforced is not None
    return enforced


TEXTS = {
    "learnt": (tagged_constraint("required"), TAGGED_CALLS),
    "learnt, after a thought": (tagged_constraint("required", OPENED), f"I add.</think>\n{TAGGED_CALLS}"),
    "learnt, free text": (tagged_constraint("auto"), f"Both at once.\n{TAGGED_CALLS} and on"),
    "learnt, all of it": (tagged_constraint("auto", OPENED), f"I add <x>.</think>\nBoth.\n{TAGGED_CALLS}"),
    "json": (constraint("json", NUMBER), '{"n":\n  42 }'),
    "json of anything": (constraint("json", {"type": "object"}), '{"a": [1.5, "x\\u00e9 ☃", {"b": null}]}'),
    "regex": (constraint("regex", r"[a-z]+ \d{2,3}(\.|é)?"), "hello 123é"),
    "choice": (constraint("choice", ['a "quoted" one', "a\ttab", "plain"]), 'a "quoted" one'),
    "grammar": (constraint("grammar", 'root ::= ("yes" | "no") (" " [0-9]+)*'), "yes 17 4"),
    "lark": (constraint("grammar", 'start: "yes" | "no"'), "yes"),
    "pythonic": (call_constraint(bundled("pythonic")), bundled("pythonic").render(CALLS)),
    "hermes": (call_constraint(bundled("hermes")), bundled("hermes").render(CALLS)),
    "structural tag": (KINDS["structural_tag"][0], "<n>true</n>"),
    "legacy tag": (
        constraint(
            "structural_tag",
            {"structures": [{"begin": "<n>", "schema": NUMBER, "end": "</n>"}], "triggers": ["<n"]},
        ),
        'so <n>{"n": 1}</n> and on',
    ),
}
COMPACT = {
    "json": (constraint("json", NUMBER), '{"n":42}'),
    "json of anything": (constraint("json", {"type": "object"}), '{"a":{"b":[null]}}'),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of vLLM
@pytest.mark.parametrize(("compact", "texts"), [(False, TEXTS), (True, COMPACT)], ids=["any whitespace", "compact"])
def test_masks_equal_vllms_backend_for_every_constraint_kind(
    compact: bool, texts: dict[str, tuple[Constraint, str]], demo_model_folder: Path
) -> None:
    from transformers import AutoTokenizer
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=compact),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        speculative_config=None,
    )
    tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(demo_model_folder))
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=49152)
    masks = GrammarMasks(demo_model_folder, any_whitespace=not compact)
    encode = load_tokenizer(demo_model_folder).encode
    for name, (enforced, text) in texts.items():
        ids = [*encode(text), 2]
        parameters = SamplingParams(
            stop_token_ids=[2], structured_outputs=StructuredOutputsParams(**constraint_arguments(enforced))
        )
        validate_xgrammar_grammar(parameters)
        kind, value = get_structured_output_key(parameters.structured_outputs)
        grammar = backend.compile_grammar(kind, value, parameters.all_stop_token_ids)
        expected = backend.allocate_token_bitmask(len(ids))
        for position, token_id in enumerate(ids):
            grammar.fill_bitmask(expected, position)
            assert grammar.accept_tokens("", [token_id]), name
        assert grammar.is_terminated(), name
        ours = masks.masks_of(constrained(made([prompt(1), said(*ids)]), enforced).turns[0])
        assert ours is not None
        assert (ours.unpacked() == TokenMasks(expected.numpy(), np.arange(len(ids)), 49152).unpacked()).all(), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of vLLM
@given(choices=st.lists(st.text(), min_size=1, max_size=4), text=st.text("ab:=# /\n\t", max_size=30))
def test_choice_grammar_and_lark_detection_equal_vllms(choices: list[str], text: str) -> None:
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    assert module._choice_grammar(choices) == choice_as_grammar(choices)
    assert module._is_lark(text) == grammar_is_likely_lark(text)


def test_a_model_without_a_size_of_its_vocabulary_is_refused(tmp_path: Path, demo_model_folder: Path) -> None:
    for file in demo_model_folder.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadModel, match=r"GrammarMasks\(vocabulary="):
        GrammarMasks(tmp_path)
    assert GrammarMasks(tmp_path, vocabulary=49160).vocabulary == 49160
