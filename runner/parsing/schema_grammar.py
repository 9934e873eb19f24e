"""Grammar of the answers that a JSON schema allows, for `Sampling(schema=)` and an endpoint's `response_format`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind
from runner.parsing.dialects import free_json
from runner.parsing.ebnf import Rules, either
from runner.parsing.schema_rules import SchemaRules, UnenforcedKeywords, UnsatisfiableSchema
from runner.tools.modern_schema import modern
from runner.tools.schema_shapes import shapes_of

__all__ = ["answer_constraint", "not_enforced"]


def answer_constraint(schema: Any) -> Constraint:
    """Return the constraint for a schema: JSON on one line or indented, with members in the order of the schema.

    Raises:
        BadOption: no value satisfies the schema.
    """
    try:
        return Constraint(ConstraintKind.GRAMMAR, _written(json.dumps(schema), arguments=False).grammar)
    except UnsatisfiableSchema as error:
        raise BadOption(f"Sampling(schema=...): {error}, so no answer is possible: fix the schema.") from None


def not_enforced(schema: Any, *, arguments: bool = False) -> list[str]:
    """Return the requirements of a schema that its grammar does not enforce, each a keyword with its path.

    With `arguments`, the schema describes a tool's arguments as JSON. Otherwise it describes an answer, and keywords
    that are not validated either are included. The list is empty if no value satisfies the schema.
    """
    try:
        written = _written(json.dumps(schema), arguments=arguments)
    except UnsatisfiableSchema:
        return []  # such a schema is refused with an error
    notes = [] if arguments else [str(note) for note in written.notes]
    return list(dict.fromkeys([*notes, *written.left_out]))


class _Written(NamedTuple):
    """A grammar, and the keywords that it does not enforce."""

    grammar: str
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


@lru_cache(maxsize=256)
def _written(text: str, *, arguments: bool) -> _Written:
    rules, shapes, left_out = Rules({}), shapes_of(text), UnenforcedKeywords()
    writer = SchemaRules(rules, free_json(), shapes, "", "", left_out)
    if arguments:
        allowed = shapes.arguments()
        root = either(writer.shape(shape, closed=True) for shape in allowed) if allowed else '""'
    else:
        root = writer.value(shapes.whole)
    notes = tuple(str(note) for note in modern(json.loads(text)).notes)
    return _Written(rules.grammar(root), tuple(left_out.sentences()), notes)
