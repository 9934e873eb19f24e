"""Limitations of a learnt call format, each with a description for users."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

__all__ = ["DESCRIPTIONS", "CallLimitation"]


class CallLimitation(enum.StrEnum):
    """A limitation of a call format whose calls can be read. Run files store it under the key `traits`."""

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
    CallLimitation.CLOSING_IN_STRING: "A string that contains the complete end of the calls ends them.",
    CallLimitation.ONE_CALL: "The template writes one call per turn; it drops or garbles further parallel calls.",
    CallLimitation.BARE: "No marker starts a call: text is a call if it names a tool and the turn ends with it. "
    "Strict arguments need a required call.",
    CallLimitation.CONTENT_DROPPED: "The template drops text beside calls from the history.",
    CallLimitation.CONTENT_BEHIND: "The template writes text beside calls after the calls.",
    CallLimitation.NAME_IN_ID: "The name of a call is written only in its id, so ids stay as the model wrote them.",
    CallLimitation.QUOTED_UNESCAPED: "Quoted strings have no escapes: the text after a quote decides whether it ends "
    "the string.",
    CallLimitation.NO_ARGUMENTS_UNWRITABLE: "The template writes calls without arguments in a form that cannot be "
    "read.",
    CallLimitation.SOME_TYPES_UNWRITABLE: "The template drops values of some types, or writes them in an unknown "
    "format.",
    CallLimitation.SOME_VALUES_REFUSED: "The template raises on some arguments, such as null.",
    CallLimitation.MARKS_IN_STRING: "A string that contains a marker of the format may be cut there, or not be read.",
    CallLimitation.END_IN_STRING: "A string that contains its own end marker can be read, but required and strict "
    "calls cannot write one.",
    CallLimitation.CONTENT_INSIDE: "The template writes text beside calls inside the call section, where only calls "
    "are read.",
}
