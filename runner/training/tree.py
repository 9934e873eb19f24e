"""Shared prefixes: the rows of a group as one token tree, so that a prompt which 8 episodes share is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.checked import is_whole
from runner.errors import BadBatch, BadOption
from runner.training.exactness import temperatures
from runner.training.rows import TrainingRow

__all__ = ["LossTerms", "Saving", "TokenTree"]

_NO_PARENT_INDEX = -1
_TERM_KINDS = (np.int32, np.int32, np.int32, np.int32, np.float32, np.float32, np.int32)

_Nodes: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """What the loss is a sum of: one term for each trained id of each row, however many rows share the id's node.

    So the loss stays that of the single rows: `advantages[terms.row]` gives each term its own row's advantage, and
    `padded[terms.row, terms.position]` its value in any padded batch of the same rows.
    """

    row: NDArray[np.int32]
    """The term's row, as an index into the rows that were given, shape [terms], int32."""
    position: NDArray[np.int32]
    """The id's position in its row, shape [terms], int32."""
    target_id: NDArray[np.int32]
    """The id whose probability the term is about, shape [terms], int32."""
    parent_node: NDArray[np.int32]
    """The node whose logits predict it, shape [terms], int32."""
    logprobs: NDArray[np.float32]
    """The log-probability that it was sampled with in this row, in nats, shape [terms], float32."""
    temperatures: NDArray[np.float32]
    """The divisor of its logits.

    With it they give the probability that it was sampled with in this row; shape [terms], float32.
    """
    versions: NDArray[np.int32]
    """The index of its weight version in this row into the table of versions, shape [terms], int32."""
    logit: NDArray[np.int32]
    """The parent node, as an index into `TokenTree.logit_nodes`, shape [terms], int32."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Rows that begin alike, merged: one node for each id that has the same ids before it. A forest if some share none.

    Nodes stand in depth-first order, so the nodes below a node directly follow it, and a query sees a key, that is an
    ancestor or itself, when `enter[key] <= enter[query] < leave[key]`.
    """

    ids: NDArray[np.int32]
    """The token id of each node, shape [nodes], int32."""
    parents: NDArray[np.int32]
    """The node before each, -1 for a first id, shape [nodes], int32."""
    positions: NDArray[np.int32]
    """The number of ids that stand before each in its rows, shape [nodes], int32."""
    leave: NDArray[np.int32]
    """One past the last node below each, shape [nodes], int32."""
    rows: NDArray[np.int32]
    """Which of the given rows are in this tree, ascending, shape [rows], int32."""
    row_nodes: tuple[NDArray[np.int32], ...]
    """For each of `rows`, the node of each of its positions, shape [length], int32."""
    logit_nodes: NDArray[np.int32]
    """The nodes that predict a trained id, ascending, shape [logits], int32. Only their logits are needed."""
    terms: LossTerms
    """The terms that the loss is a sum of."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow]) -> TokenTree:
        """All rows as one tree, whatever its size.

        Raises:
            BadBatch: `rows` are no rows, such as groups.
        """
        _check_rows(rows)
        order, shared = _in_order(rows)
        return _tree(rows, order, shared)

    @classmethod
    def packs(cls, rows: Sequence[TrainingRow], *, nodes: int = 900) -> list[TokenTree]:
        """Rows as several trees of at most `nodes` nodes each, where a row longer than that is a tree of its own.

        Rows are put in the order of their ids, so that those of a group, and groups that share a system prompt, stand
        side by side; they are cut where the fewest ids have to be computed again, then into as few trees as can be.
        Give room for a prompt and several answers: where only one row fits, nothing is shared.

        Args:
            rows: the rows of one group or many.
            nodes: the nodes that the memory for one forward and backward pass holds.

        Raises:
            BadBatch: `rows` are no rows, such as groups.
            BadOption: `nodes` is no number, or below 1.
        """
        _check_rows(rows)
        if not is_whole(nodes, least=1):
            raise BadOption(
                f"nodes={nodes!r:.60}: a tree has at least 1 node. Give what a prompt and its answers take: 900"
            )
        order, shared = _in_order(rows)
        cuts = _cuts([len(rows[index]) for index in order], shared, nodes)
        return [_tree(rows, order[start:end], shared[start:end]) for start, end in pairwise(cuts)]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def enter(self) -> NDArray[np.int32]:
        """The moment at which each node is entered, depth first: its own index, shape [nodes], int32."""
        return np.arange(len(self), dtype=np.int32)

    @property
    def saving(self) -> Saving:
        """What this tree saves."""
        return Saving.of([self])

    def mask(self) -> NDArray[np.bool_]:
        """Which key (column) each query (row) sees: its ancestors and itself, shape [nodes, nodes], bool."""
        query = self.enter[:, None]
        return (self.enter <= query) & (query < self.leave)


@dataclass(frozen=True, slots=True)
class Saving:
    """What trees save; printed, it is one line."""

    rows: int
    """The number of rows."""
    tokens: int
    """The number of their ids, counted in each row."""
    padded: int
    """The number of ids in one padded batch of them."""
    nodes: int
    """The number of ids that are computed."""
    logits: int
    """The number of nodes whose logits are computed."""
    trees: int
    """The number of trees, each of them one forward pass."""

    @classmethod
    def of(cls, trees: Iterable[TokenTree]) -> Saving:
        """What these trees save together."""
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
        """How many ids of rows a node stands for; 1.0 where nothing is shared."""
        return self.tokens / self.nodes if self.nodes else 1.0

    @property
    def padded_ratio(self) -> float:
        """How many ids of the padded batch a node stands for."""
        return self.padded / self.nodes if self.nodes else 1.0

    def __str__(self) -> str:
        trees = "1 tree" if self.trees == 1 else f"{self.trees:,} trees"
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        return (
            f"{rows} as {trees}: {self.nodes:,} nodes for {self.tokens:,} ids ({self.ratio:.1f}x), "
            f"{self.padded:,} padded ({self.padded_ratio:.1f}x); logits at {self.logits:,}"
        )


def _check_rows(rows: object) -> None:
    fix = "Give rows: Selection.of(groups).rows, or batch.rows."
    if not isinstance(rows, Sequence):
        raise BadBatch(f"a token tree is made of a list of rows, and {type(rows).__name__} is none. {fix}")
    for row in rows:
        if not isinstance(row, TrainingRow):
            raise BadBatch(f"a token tree is made of rows, and {type(row).__name__} is none. {fix}")


def _in_order(rows: Sequence[TrainingRow]) -> tuple[list[int], list[int]]:
    """Indices of the rows in the order of their ids, and how many first ids each shares with the one before it."""
    # Big-endian bytes compare as the ids do, in C, and a prefix comes first.
    keys = [row.ids.astype(">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [_common(rows[before].ids, rows[after].ids) for before, after in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def _cuts(lengths: Sequence[int], shared: Sequence[int], nodes: int) -> list[int]:
    """Where the ordered rows are cut, from 0 to their number: least computed again, then fewest trees."""
    best = [(0, 0, 0)]  # for the first rows: ids computed again, trees, where the last of them begins
    for end in range(1, len(lengths) + 1):
        choices = [
            (best[start][0] + (shared[start] if start else 0), best[start][1] + 1, start)
            for start in _starts(lengths, shared, end, nodes)
        ]
        best.append(min(choices))  # tuples compare by what comes first in them
    cuts = [len(lengths)]
    while cuts[-1] > 0:
        cuts.append(best[cuts[-1]][2])
    return cuts[::-1]


def _starts(lengths: Sequence[int], shared: Sequence[int], end: int, nodes: int) -> Iterator[int]:
    """Where a tree that ends before row `end` may begin; a single row always may."""
    grown = 0
    for start in range(end - 1, -1, -1):
        if start < end - 1 and lengths[start] + grown > nodes:
            return
        yield start
        grown += lengths[start] - shared[start]


def _tree(rows: Sequence[TrainingRow], order: Sequence[int], shared: Sequence[int]) -> TokenTree:
    """One tree of the rows in `order`."""
    paths = dict(zip(order, _paths([len(rows[index]) for index in order], shared), strict=True))
    nodes = max((int(path[-1]) + 1 for path in paths.values() if len(path)), default=0)
    ids, positions, leave = (np.empty(nodes, dtype=np.int32) for _ in range(3))
    parents = np.full(nodes, _NO_PARENT_INDEX, dtype=np.int32)
    # Rows that share nodes write the same there, so each may write its whole path.
    for index, path in paths.items():
        ids[path] = rows[index].ids
        positions[path] = np.arange(len(path))
        parents[path[1:]] = path[:-1]
        leave[path] = path[-1:] + 1  # later rows reach further, so what stands is the last node below
    members = sorted(paths)
    # An empty piece of each type goes first, since a tree may have no rows, and np.concatenate takes no empty list.
    pieces = [tuple(np.empty(0, kind) for kind in _TERM_KINDS), *(_terms(rows[at], at, paths[at]) for at in members)]
    joined = [np.concatenate(each) for each in zip(*pieces, strict=True)]
    logit_nodes, logit = np.unique(joined[3], return_inverse=True)  # of the parent nodes
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
    """The nodes of each row, numbered as they are met; the first row shares nothing with one before it."""
    path, end = np.empty(0, dtype=np.int32), 0
    for length, kept in zip(lengths, [0, *shared[1:]], strict=False):
        path = np.concatenate([path[:kept], np.arange(end, end + length - kept, dtype=np.int32)])
        end += length - kept
        yield path


def _terms(row: TrainingRow, index: int, path: _Nodes) -> tuple[NDArray[Any], ...]:
    """The fields of one row's `LossTerms` in their order, without the last one, `logit`, which takes the whole tree."""
    # The first id has no node before it; it is never trained.
    at = (np.flatnonzero(row.loss_mask[1:]) + 1).astype(np.int32)
    values = (row.ids[at], path[at - 1], row.logprobs[at], temperatures(row)[at], row.versions[at])
    return np.full_like(at, index), at, *values
