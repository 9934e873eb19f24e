"""What a learnt format of calls cannot do, trait by trait, each with what that means for who plays with it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

__all__ = ["SENTENCES", "CallTrait"]


class CallTrait(enum.StrEnum):
    """What a format cannot do, though calls can be read."""

    UNTYPED = "untyped"
    CLOSING_IN_STRING = "closing_in_string"
    ONE_CALL = "one_call"
    BARE = "bare"
    CONTENT_DROPPED = "content_dropped"
    CONTENT_BEHIND = "content_behind"
    NAME_IN_ID = "name_in_id"
    QUOTED_UNESCAPED = "quoted_unescaped"
    NO_ARGUMENTS_UNWRITABLE = "no_arguments_unwritable"
    SOME_TYPES_UNWRITABLE = "some_types_unwritable"
    SOME_VALUES_REFUSED = "some_values_refused"
    MARKS_IN_STRING = "marks_in_string"
    END_IN_STRING = "end_in_string"
    CONTENT_INSIDE = "content_inside"


SENTENCES: Final[Mapping[CallTrait, str]] = {
    CallTrait.UNTYPED: "A string stands as it is: 5 and '5' look alike, so the tool's schema decides which is meant.",
    CallTrait.CLOSING_IN_STRING: "A string that holds the whole of what ends the calls ends them.",
    CallTrait.ONE_CALL: "The template writes one call a turn; of parallel calls it drops or garbles the others.",
    CallTrait.BARE: "Nothing announces a call: it is one where it names a tool and the turn ends with it. Strict "
    "arguments need a required call.",
    CallTrait.CONTENT_DROPPED: "What is said beside calls is not in the history as the template writes it.",
    CallTrait.CONTENT_BEHIND: "What is said beside calls stands behind them.",
    CallTrait.NAME_IN_ID: "The name of a call stands in its id alone, so ids are kept as the model wrote them.",
    CallTrait.QUOTED_UNESCAPED: "A string in quotes has no escapes: what stands behind its end tells where that is.",
    CallTrait.NO_ARGUMENTS_UNWRITABLE: "A call without arguments is written in no way that could be read.",
    CallTrait.SOME_TYPES_UNWRITABLE: "Values of some types are left out, or written so that no format was found.",
    CallTrait.SOME_VALUES_REFUSED: "The template raises on some arguments, such as null.",
    CallTrait.MARKS_IN_STRING: "A string that holds one of the format's own marks may be cut there, or not be read.",
    CallTrait.END_IN_STRING: "A string that holds the mark that ends it is read, but no required or strict call "
    "can have one.",
    CallTrait.CONTENT_INSIDE: "What is said beside calls stands inside of what announces them, where only calls are "
    "read.",
}
"""What each trait means."""
