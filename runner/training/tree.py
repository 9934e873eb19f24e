"""Token trees: rows of a group are merged at shared prefixes, so that a prompt of 8 episodes is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.checked import is_whole
from runner.errors import BadBatch, BadOption
from runner.quantities import counted
from runner.training.exactness import temperatures
from runner.training.rows import TrainingRow

__all__ = ["LossTerms", "Saving", "TokenTree"]

_NO_PARENT_INDEX = -1
_TERM_KINDS = (np.int32, np.int32, np.int32, np.int32, np.float32, np.float32, np.int32)

_Nodes: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """Terms of the loss: one for each trained id of each row, even if rows share the id's node.

    Therefore the loss equals the loss of single rows. `advantages[terms.row]` is each term's advantage, and
    `padded[terms.row, terms.position]` its value in a padded batch of the same rows.
    """

    row: NDArray[np.int32]
    """Index of the term's row in the given rows, shape [terms], int32."""
    position: NDArray[np.int32]
    """Position of the id in its row, shape [terms], int32."""
    target_id: NDArray[np.int32]
    """The trained id, shape [terms], int32."""
    parent_node: NDArray[np.int32]
    """Node whose logits predict the id, shape [terms], int32."""
    logprobs: NDArray[np.float32]
    """Log-probability with which the engine sampled the id in this row, in nats, shape [terms], float32."""
    temperatures: NDArray[np.float32]
    """Divisor of the logits of the term, the temperature of the sampling in this row, shape [terms], float32."""
    versions: NDArray[np.int32]
    """Index of the term's weight version in the table of versions, shape [terms], int32."""
    logit: NDArray[np.int32]
    """Index of the parent node in `TokenTree.logit_nodes`, shape [terms], int32."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Rows merged at common prefixes: rows share a node if all ids up to it are equal. There may be several roots.

    Nodes are in depth-first order, so descendants directly follow their node. A query attends to a key
    (an ancestor or itself) if `enter[key] <= enter[query] < leave[key]`.
    """

    ids: NDArray[np.int32]
    """Token id of each node, shape [nodes], int32."""
    parents: NDArray[np.int32]
    """Parent of each node, -1 for a first id, shape [nodes], int32."""
    positions: NDArray[np.int32]
    """Number of ids before each node in its rows, shape [nodes], int32."""
    leave: NDArray[np.int32]
    """Index after the last descendant of each node, shape [nodes], int32."""
    rows: NDArray[np.int32]
    """Indices of the given rows in this tree, ascending, shape [rows], int32."""
    row_nodes: tuple[NDArray[np.int32], ...]
    """Node of each position, for each of `rows`, shape [length], int32."""
    logit_nodes: NDArray[np.int32]
    """Nodes that predict a trained id, ascending, shape [logits], int32. Only their logits are needed."""
    terms: LossTerms
    """Terms of the loss."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow]) -> TokenTree:
        """Build one tree of all rows, of any size.

        Raises:
            BadBatch: `rows` are not rows, but for example groups.
        """
        _check_rows(rows)
        order, shared = _in_order(rows)
        return _tree(rows, order, shared)

    @classmethod
    def packs(cls, rows: Sequence[TrainingRow], *, nodes: int = 900) -> list[TokenTree]:
        """Build trees of at most `nodes` nodes each; a longer row is a tree of its own.

        Rows are sorted by their ids, so that rows of a group, and groups with the same system prompt, are neighbours.
        The split minimizes the ids that are computed again, then the number of trees. Choose `nodes` for a prompt
        and several answers, since nothing is shared if only one row fits.

        Args:
            rows: the rows of one group or many.
            nodes: number of nodes that fit the memory of one forward and backward pass.

        Raises:
            BadBatch: `rows` are not rows, but for example groups.
            BadOption: `nodes` is not a number, or below 1.
        """
        _check_rows(rows)
        if not is_whole(nodes, least=1):
            raise BadOption(
                f"nodes={nodes!r:.60}: a tree has at least 1 node. Give the size of a prompt and its answers, "
                "such as 900."
            )
        order, shared = _in_order(rows)
        cuts = _cuts([len(rows[index]) for index in order], shared, nodes)
        return [_tree(rows, order[start:end], shared[start:end]) for start, end in pairwise(cuts)]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def enter(self) -> NDArray[np.int32]:
        """Step at which a depth-first walk enters each node: its own index, shape [nodes], int32."""
        return np.arange(len(self), dtype=np.int32)

    @property
    def saving(self) -> Saving:
        """The computation that this tree saves."""
        return Saving.of([self])

    def mask(self) -> NDArray[np.bool_]:
        """True where the query (row) attends to the key (column): an ancestor or itself. Shape [nodes, nodes], bool."""
        query = self.enter[:, None]
        return (self.enter <= query) & (query < self.leave)


@dataclass(frozen=True, slots=True)
class Saving:
    """The computation that trees save; printed as one line."""

    rows: int
    """Number of rows."""
    tokens: int
    """Number of the ids of all rows; a shared id counts once for each of its rows."""
    padded: int
    """Number of ids in a padded batch of the rows."""
    nodes: int
    """Number of nodes of all trees, which are the ids that are computed."""
    logits: int
    """Number of nodes whose logits are computed."""
    trees: int
    """Number of trees, each one forward pass."""

    @classmethod
    def of(cls, trees: Iterable[TokenTree]) -> Saving:
        """Sum the savings of trees."""
        trees = list(trees)
        lengths = [len(path) for tree in trees for path in tree.row_nodes]
        return cls(
            rows=len(lengths),
            tokens=sum(lengths),
            padded=len(lengths) * max(lengths, default=0),
            nodes=sum(len(tree) for tree in trees),
            logits=sum(len(tree.logit_nodes) for tree in trees),
            trees=len(trees),
        )

    @property
    def ratio(self) -> float:
        """Ids of rows per node; 1.0 without shared prefixes."""
        return self.tokens / self.nodes if self.nodes else 1.0

    @property
    def padded_ratio(self) -> float:
        """Ids of the padded batch per node."""
        return self.padded / self.nodes if self.nodes else 1.0

    def __str__(self) -> str:
        rows, trees = counted(self.rows, "row"), counted(self.trees, "tree")
        return (
            f"{rows} as {trees}: {self.nodes:,} nodes for {self.tokens:,} ids ({self.ratio:.1f}x), "
            f"{self.padded:,} padded ({self.padded_ratio:.1f}x); logits at {self.logits:,}"
        )


def _check_rows(rows: object) -> None:
    fix = "Give rows: Selection.of(groups).rows, or batch.rows."
    if not isinstance(rows, Sequence):
        raise BadBatch(f"a token tree needs a list of rows, got {type(rows).__name__}. {fix}")
    for row in rows:
        if not isinstance(row, TrainingRow):
            raise BadBatch(f"a token tree needs rows, got {type(row).__name__}. {fix}")


def _in_order(rows: Sequence[TrainingRow]) -> tuple[list[int], list[int]]:
    """Sort the rows by their ids, and count the leading ids that each row shares with the previous one."""
    # Big-endian bytes sort like the ids, compare in C, and put a prefix first.
    keys = [row.ids.astype(">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [_common(rows[before].ids, rows[after].ids) for before, after in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def _cuts(lengths: Sequence[int], shared: Sequence[int], nodes: int) -> list[int]:
    """Return the cuts of the sorted rows into trees: fewest ids computed again, then fewest trees."""
    best = [(0, 0, 0)]  # for the first `end` rows: ids computed again, number of trees, start of the last tree
    for end in range(1, len(lengths) + 1):
        choices = [
            (best[start][0] + (shared[start] if start else 0), best[start][1] + 1, start)
            for start in _starts(lengths, shared, end, nodes)
        ]
        best.append(min(choices))  # the fewest ids computed again, and of equal choices, the fewest trees
    cuts = [len(lengths)]
    while cuts[-1] > 0:
        cuts.append(best[cuts[-1]][2])
    return cuts[::-1]


def _starts(lengths: Sequence[int], shared: Sequence[int], end: int, nodes: int) -> Iterator[int]:
    """Yield the first rows that a tree can have if it ends before row `end`; a single row is always possible."""
    grown = 0
    for start in range(end - 1, -1, -1):
        if start < end - 1 and lengths[start] + grown > nodes:
            return
        yield start
        grown += lengths[start] - shared[start]


def _tree(rows: Sequence[TrainingRow], order: Sequence[int], shared: Sequence[int]) -> TokenTree:
    """Build one tree of the rows in `order`."""
    paths = dict(zip(order, _paths([len(rows[index]) for index in order], shared), strict=True))
    nodes = max((int(path[-1]) + 1 for path in paths.values() if len(path)), default=0)
    ids, positions, leave = (np.empty(nodes, dtype=np.int32) for _ in range(3))
    parents = np.full(nodes, _NO_PARENT_INDEX, dtype=np.int32)
    # Rows have equal values at shared nodes, so each row may write its whole path.
    for index, path in paths.items():
        ids[path] = rows[index].ids
        positions[path] = np.arange(len(path))
        parents[path[1:]] = path[:-1]
        leave[path] = path[-1:] + 1  # later rows have higher nodes, so the last value remains
    members = sorted(paths)
    # Begin with empty arrays, since a tree may have no rows, and np.concatenate refuses an empty list.
    pieces = [tuple(np.empty(0, kind) for kind in _TERM_KINDS), *(_terms(rows[at], at, paths[at]) for at in members)]
    joined = [np.concatenate(each) for each in zip(*pieces, strict=True)]
    logit_nodes, logit = np.unique(joined[3], return_inverse=True)  # indices of the parent nodes
    joined.append(logit.astype(np.int32))
    return TokenTree(
        ids=ids,
        parents=parents,
        positions=positions,
        leave=leave,
        rows=np.array(members, dtype=np.int32),
        row_nodes=tuple(paths[index] for index in members),
        logit_nodes=logit_nodes,
        terms=LossTerms(*joined),
    )


def _paths(lengths: Sequence[int], shared: Sequence[int]) -> Iterator[_Nodes]:
    """Yield the nodes of each row, numbered in order; the first row shares none."""
    path, end = np.empty(0, dtype=np.int32), 0
    for length, kept in zip(lengths, [0, *shared[1:]], strict=False):
        path = np.concatenate([path[:kept], np.arange(end, end + length - kept, dtype=np.int32)])
        end += length - kept
        yield path


def _terms(row: TrainingRow, index: int, path: _Nodes) -> tuple[NDArray[Any], ...]:
    """Return the fields of one row's `LossTerms` in order, without `logit`, which depends on the whole tree."""
    # The first id has no parent and is never trained.
    at = (np.flatnonzero(row.loss_mask[1:]) + 1).astype(np.int32)
    values = (row.ids[at], path[at - 1], row.logprobs[at], temperatures(row)[at], row.versions[at])
    return np.full_like(at, index), at, *values
