"""NeMo RL's prefix replacement on three lists of ids. Lists that do not match are refused, with a reason."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from runner.errors import BadOption

__all__ = ["PrefixReplacement", "PrefixResult", "replace_prefix_tokens"]


class PrefixResult(enum.StrEnum):
    """The result for the three lists. The first two results have ids, and all others are refusals."""

    FIRST_TURN = "first_turn"
    """The model has not sampled anything yet; the template's ids are used unchanged."""
    JOINED = "joined"
    """The model's own ids, followed by the template's ids from the close of the last turn on."""
    NO_EOS = "no_eos"
    """The template closes no turn with an EOS, so the place to join is unknown."""
    SECOND_STOP = "second_stop"
    """The model stopped with an id that is not an EOS, and the template's EOS would follow it."""
    TWO_TRAILING_EOS = "two_trailing_eos"
    """The model's ids end with more EOS than the template writes at the end of a turn."""
    TURN_WITHOUT_IDS = "turn_without_ids"
    """The template closes a turn that the model's ids lack: an assistant turn without ids, or an EOS in a message."""
    HISTORY_SHRUNK = "history_shrunk"
    """A turn of the model's ids is missing in the template's ids, or has no EOS in them."""
    HISTORY_EDITED = "history_edited"
    """Earlier text has changed."""

    @property
    def refused(self) -> bool:
        """True if there is no replacement; `PrefixReplacement.explanation` has the reason."""
        return self not in (PrefixResult.FIRST_TURN, PrefixResult.JOINED)


@dataclass(frozen=True, slots=True)
class PrefixReplacement:
    """The next prompt, or a refusal."""

    ids: list[int] | None
    """The next prompt; None if it is refused."""
    result: PrefixResult
    """The result, or the name of the refusal."""
    explanation: str = ""
    """The reason for a refusal, for people; "" if there is no refusal."""


def replace_prefix_tokens(
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
    eos_token_id: int | Collection[int],
    *,
    stop_ids: Collection[int] = (),
    sampled: Sequence[int] | None = None,
) -> PrefixReplacement:
    """Return the template's ids with the history as the model saw and sampled it, not as the template encodes it again.

    The model's ids stay bit for bit. The ids of `template_token_ids` after its n-th EOS follow, where n is the number
    of EOS in `template_prefix_token_ids`. If the model's ids end with an EOS, it replaces the n-th EOS of the template.
    A turn that was cut before an EOS is closed with the template's EOS.

    Two cases are detected only with `sampled`:

    - *An edit of an earlier message*, since any id may be a sampled id. Without `sampled`, only the two lists of the
      template are compared. A turn in `template_token_ids` may lack ids of the same turn in
      `template_prefix_token_ids`, such as reasoning that the template drops. Any other difference is refused, with or
      without `sampled`. So a template that adds ids to earlier turns is refused.
    - *A turn without ids, or one more EOS*, if the first ids of the model and of the prefix differ, since the numbers
      of their turns are not compared then. NeMo RL publishes such a case, and joins the ids.

    Three cases are never detected: an edit of the model's own words in the messages (the sampled ids are kept), a stop
    that is not in `stop_ids` (it looks like a turn that was cut), and, if there are several EOS ids, a turn that ends
    with another EOS than in the template.

    The source is `replace_prefix_tokens` in NVIDIA-NeMo/RL, nemo_rl/models/generation/openai_server_utils.py (before:
    vllm/vllm_worker_async.py). Our EOS id replaces their tokenizer argument, and our results replace their assertions.

    Args:
        model_prefix_token_ids: prompt and generation so far, as the engine had them; empty before the first turn.
        template_prefix_token_ids: the template's ids up to the last assistant turn, including this turn.
        template_token_ids: the template's ids of the whole history, including the generation prompt.
        eos_token_id: the id that closes a turn in the template, or several such ids.
        stop_ids: ids that may have ended the model's turn. A turn that ends with such an id, which is not an EOS, is
            refused.
        sampled: 1 for each of the model's ids that was sampled, else 0, as in `TokenLog.mask`; shape
            [len(model_prefix_token_ids)]. Every id with 0 must then be in the template's ids too, bit for bit. If the
            template writes a generation prompt that it drops from history (an opened reasoning block), set 1 for these
            ids as well.

    Raises:
        BadOption: there is no EOS id, or `sampled` has another length than the model's ids.
    """
    eos = _as_set(eos_token_id)
    model, prefix, everything = list(model_prefix_token_ids), list(template_prefix_token_ids), list(template_token_ids)
    if sampled is not None and len(sampled) != len(model):
        raise BadOption(f"sampled has {len(sampled)} entries for {len(model)} ids of the model: give one for each")
    if not model:
        return PrefixReplacement(everything, PrefixResult.FIRST_TURN)
    refusal = (
        _stopped_otherwise(model, prefix, eos, frozenset(stop_ids))
        or _miscounted(model, prefix, everything, eos)
        or _rewritten(prefix, everything, eos)
    )
    if refusal:
        return refusal
    close = _closes(everything, eos)[len(_closes(prefix, eos)) - 1]
    if sampled is not None:
        refusal = _lost(model, sampled, prefix, "template_prefix_token_ids", eos) or _lost(
            model, sampled, everything[: close + 1], "template_token_ids", eos
        )
    ended = model[-1] in eos
    return refusal or PrefixReplacement(model + everything[close + ended :], PrefixResult.JOINED)


def _as_set(eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_token_id is None or (isinstance(eos_token_id, Collection) and not eos_token_id):
        raise BadOption(f"eos_token_id is {eos_token_id!r}: give the id, or ids, that close a turn in the template")
    return frozenset(eos_token_id if isinstance(eos_token_id, Collection) else [eos_token_id])


def _closes(ids: Sequence[int], eos: Collection[int]) -> list[int]:
    """Return the indices of all EOS ids."""
    return [index for index, token_id in enumerate(ids) if token_id in eos]


def _stopped_otherwise(
    model: list[int], prefix: list[int], eos: frozenset[int], stop_ids: frozenset[int]
) -> PrefixReplacement | None:
    """Return a refusal if the template does not end a turn as the model's ids end; else None."""
    if not eos.intersection(prefix):
        return _refused(PrefixResult.NO_EOS, f"none of {sorted(eos)} is in template_prefix_token_ids")
    if model[-1] in stop_ids - eos:
        return _refused(
            PrefixResult.SECOND_STOP,
            f"the model stopped with {model[-1]}, and the template closes the turn with one of {sorted(eos)}: "
            f"add {model[-1]} to eos_token_id if it closes a turn as well",
        )
    ends = _trailing(model, eos)
    if ends > max(1, _trailing(prefix, eos)):
        return _refused(PrefixResult.TWO_TRAILING_EOS, f"model_prefix_token_ids ends with {ends} EOS: {model[-ends:]}")
    return None


def _trailing(ids: list[int], eos: frozenset[int]) -> int:
    return next((count for count, token_id in enumerate(reversed(ids)) if token_id not in eos), len(ids))


def _miscounted(
    model: list[int], prefix: list[int], everything: list[int], eos: frozenset[int]
) -> PrefixReplacement | None:
    """Return a refusal if the numbers of turns in the three lists do not match; else None."""
    said = len(_closes(model, eos)) + (model[-1] not in eos)  # the template closes a turn that was cut
    closed, closed_in_all = len(_closes(prefix, eos)), len(_closes(everything, eos))
    counts = f"model_prefix_token_ids has {said} turns (counted by EOS), but template_prefix_token_ids has {closed}"
    if closed > said and model[0] == prefix[0]:
        return _refused(PrefixResult.TURN_WITHOUT_IDS, counts)
    if closed < said:
        return _refused(PrefixResult.HISTORY_SHRUNK, counts)
    if closed_in_all < closed:
        counts = (
            f"template_prefix_token_ids has {closed} turns (counted by EOS), but template_token_ids has {closed_in_all}"
        )
        return _refused(PrefixResult.HISTORY_SHRUNK, counts)
    return None


def _rewritten(prefix: list[int], everything: list[int], eos: frozenset[int]) -> PrefixReplacement | None:
    """Return a refusal if a turn in `everything` is not a subsequence of the same turn in `prefix`; else None."""
    turns = list(_turns(prefix, eos))
    for number, (turn, again) in enumerate(zip(turns, _turns(everything, eos), strict=False)):
        if turn == again or _is_subsequence(again, turn):
            continue
        last = number == len(turns) - 1
        return _refused(
            PrefixResult.HISTORY_SHRUNK if last else PrefixResult.HISTORY_EDITED,
            f"turn {number} by its EOS{', the last,' if last else ''} is {_shown(turn)} in template_prefix_token_ids, "
            f"and {_shown(again)} in template_token_ids",
        )
    return None


def _turns(ids: list[int], eos: frozenset[int]) -> Iterator[list[int]]:
    """Yield the ids of each turn without its EOS. Ids after the last EOS are left out."""
    begin = 0
    for close in _closes(ids, eos):
        yield ids[begin:close]
        begin = close + 1


def _is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token_id in rest for token_id in part)


def _lost(
    model: list[int], sampled: Sequence[int], render: list[int], name: str, eos: frozenset[int]
) -> PrefixReplacement | None:
    """Return a refusal if `render` lacks ids that were not sampled, or closes more turns than `model`; else None.

    Sampled turns between these ids may differ.
    """
    position, cut = 0, False  # `cut` is True after a sampled turn whose EOS is still to come
    for begin, end in _stretches(sampled):
        stretch = model[begin:end]
        if sampled[begin]:
            position = _after(position, render, eos, closes=len(_closes(stretch, eos)))
            cut = stretch[-1] not in eos
            continue
        if cut:
            closes = _closes(stretch, eos)
            if not closes:
                continue  # these ids are inside the turn, and the template may write the turn differently
            position = max(position, _after(position, render, eos) - closes[0] - 1)
        there = render[position : position + len(stretch)]
        if there != stretch:
            at = next((at for at, pair in enumerate(zip(stretch, there, strict=False)) if len({*pair}) > 1), len(there))
            return _refused(
                PrefixResult.HISTORY_EDITED,
                f"model_prefix_token_ids[{begin + at}:] is {_shown(stretch[at:])}, which was not sampled, "
                f"and {name}[{position + at}:] is {_shown(there[at:])}",
            )
        position += len(stretch)
        cut = False
    if model[-1] not in eos:
        position = _after(position, render, eos)
    extra = _closes(render[position:], eos)
    if extra:
        return _refused(
            PrefixResult.TURN_WITHOUT_IDS,
            f"{name}[{position}:{position + extra[0] + 1}] closes a turn that model_prefix_token_ids does not hold",
        )
    return None


def _stretches(sampled: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ids that are all sampled, or all not sampled."""
    begin = 0
    for index in range(1, len(sampled) + 1):
        if index == len(sampled) or bool(sampled[index]) != bool(sampled[begin]):
            yield begin, index
            begin = index


def _after(position: int, render: list[int], eos: frozenset[int], closes: int = 1) -> int:
    """Return the position after the `closes`-th EOS from `position` on, or the end of `render` if there are fewer."""
    while closes and position < len(render):
        closes -= render[position] in eos
        position += 1
    return position


def _shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:8]))}, ...]"


def _refused(result: PrefixResult, explanation: str) -> PrefixReplacement:
    return PrefixReplacement(None, result, explanation)
