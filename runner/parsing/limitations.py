"""Limitations of a learnt call format, each with a description for users."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

__all__ = ["DESCRIPTIONS", "CallLimitation"]


class CallLimitation(enum.StrEnum):
    """A limitation of a call format whose calls can be read. Run files store its value."""

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


DESCRIPTIONS: Final[Mapping[CallLimitation, str]] = {
    CallLimitation.UNTYPED: "Strings are written without quotes: 5 and '5' look alike, so the tool's schema decides "
    "the type.",
    CallLimitation.CLOSING_IN_STRING: "If a string contains the complete end of the calls, the calls end there.",
    CallLimitation.ONE_CALL: "The template writes one call per turn; it leaves out further parallel calls, or "
    "writes them wrongly.",
    CallLimitation.BARE: "No mark starts a call: text is a call if it names a tool and the turn ends with it. "
    "The schemas of strict tools are enforced only in required calls.",
    CallLimitation.CONTENT_DROPPED: "The template leaves out the text that a turn has beside its calls.",
    CallLimitation.CONTENT_BEHIND: "The template writes the text that a turn has beside its calls after the calls.",
    CallLimitation.NAME_IN_ID: "The name of a call is written only in its id, so ids stay as the model wrote them.",
    CallLimitation.QUOTED_UNESCAPED: "A quote inside a string is not escaped: the text after a quote decides whether "
    "the string ends there.",
    CallLimitation.NO_ARGUMENTS_UNWRITABLE: "The template writes calls without arguments in a form that cannot be "
    "read.",
    CallLimitation.SOME_TYPES_UNWRITABLE: "The template leaves out values of some types, or writes them in an unknown "
    "format.",
    CallLimitation.SOME_VALUES_REFUSED: "The template raises an error for some arguments, such as null.",
    CallLimitation.MARKS_IN_STRING: "A string that contains a mark of the format may be cut there, or not be read.",
    CallLimitation.END_IN_STRING: "A string that contains its own end mark can be read, but required and strict "
    "calls cannot contain such a string.",
    CallLimitation.CONTENT_INSIDE: "The template writes the text that a turn has beside its calls between the marks "
    "of the calls, where only calls are read.",
}
