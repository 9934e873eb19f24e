"""Token trees: equal beginnings are merged, a query attends to its ancestors, and no row's loss is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import BadBatch, BadOption
from runner.tasks import Task
from runner.training.batch import TrainingBatch
from runner.training.rows import TrainingRow
from runner.training.tree import Saving, TokenTree
from runner.trajectory import Trajectory
from tests.training.making import group, made, prompt, said

TRAJECTORY = Trajectory(id="episode", task=Task(id="task", prompt="Say"), index=0, agent="main", seed=0)

Ids = Sequence[int]
Rows = list[TrainingRow]


def row(ids: Ids, trained: Sequence[bool] | None = None, *, version: int = 0) -> TrainingRow:
    """Return a row with a different log-probability for each id. Every id is trained, unless `trained` selects some."""
    mask = np.ones(len(ids), dtype=np.bool_) if trained is None else np.array(trained, dtype=np.bool_)
    return TrainingRow(
        trajectory=TRAJECTORY,
        segment=0,
        ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.arange(len(ids), dtype=np.float32) - 100 * version, np.float32(0)),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(),
    )


def rows_of(texts: Sequence[str]) -> Rows:
    return [row([ord(letter) for letter in text], version=number) for number, text in enumerate(texts)]


@st.composite
def grouped_rows(draw: st.DrawFn) -> Rows:
    """Generate rows over three ids that continue earlier rows, repeat them, are their beginnings, or are empty."""
    drawn: list[list[int]] = []
    for _ in range(draw(st.integers(0, 8))):
        begin = draw(st.sampled_from([[], *drawn]))
        kept = draw(st.integers(0, len(begin)))
        drawn.append(begin[:kept] + draw(st.lists(st.integers(0, 2), max_size=6)))
    masks = [draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))) for ids in drawn]
    return [row(ids, mask, version=number) for number, (ids, mask) in enumerate(zip(drawn, masks, strict=True))]


def trie(rows: Rows) -> set[tuple[int, ...]]:
    """Return every beginning of every row: a tree has one node for each."""
    return {tuple(row.ids[: end + 1].tolist()) for row in rows for end in range(len(row))}


def ancestors(tree: TokenTree, node: int) -> list[int]:
    """Return the path from the first id of a node's rows to the node itself, found by walking up."""
    path = []
    while node != -1:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


@settings(deadline=None)
@given(grouped_rows())
def test_tree_has_one_node_for_each_distinct_prefix(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    beginnings = [tuple(tree.ids[ancestors(tree, node)].tolist()) for node in range(len(tree))]
    assert len(set(beginnings)) == len(beginnings)
    assert set(beginnings) == trie(rows)


@settings(deadline=None)
@given(grouped_rows())
def test_each_row_is_the_path_to_its_last_node(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    assert tree.rows.tolist() == list(range(len(rows)))
    for one, path in zip(rows, tree.row_nodes, strict=True):
        assert tree.ids[path].tolist() == one.ids.tolist()
        assert tree.positions[path].tolist() == list(range(len(one)))
        if len(path):
            assert ancestors(tree, int(path[-1])) == path.tolist()


@settings(deadline=None)
@given(grouped_rows())
def test_a_query_attends_to_its_ancestors_and_itself(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    expected = np.zeros((len(tree), len(tree)), dtype=np.bool_)
    for node in range(len(tree)):
        expected[node, ancestors(tree, node)] = True
    assert np.array_equal(tree.mask(), expected)


@settings(deadline=None)
@given(grouped_rows())
def test_every_trained_id_of_every_row_is_one_term(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    terms = tree.terms
    expected = [
        (index, position, int(one.ids[position]), float(one.logprobs[position]), int(one.versions[position]))
        for index, one in enumerate(rows)
        for position in range(1, len(one))
        if one.loss_mask[position]
    ]
    columns = (terms.row, terms.position, terms.target_id, terms.logprobs, terms.versions)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert len(terms) == len(expected)


@settings(deadline=None)
@given(grouped_rows())
def test_a_term_is_predicted_by_the_node_before_it(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    terms = tree.terms
    assert np.array_equal(tree.logit_nodes[terms.logit], terms.parent_node)
    assert set(tree.logit_nodes.tolist()) == set(terms.parent_node.tolist())
    for index, position, parent in zip(terms.row, terms.position, terms.parent_node, strict=True):
        assert tree.ids[ancestors(tree, int(parent))].tolist() == rows[index].ids[:position].tolist()


@settings(deadline=None)
@given(grouped_rows().flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(range(len(rows))))))
def test_the_order_of_rows_does_not_change_the_tree(drawn: tuple[Rows, list[int]]) -> None:
    rows, order = drawn
    tree, shuffled = TokenTree.of(rows), TokenTree.of([rows[index] for index in order])
    for name in ("ids", "parents", "positions", "enter", "leave", "logit_nodes"):
        assert np.array_equal(getattr(tree, name), getattr(shuffled, name)), name
    for place, index in enumerate(order):
        assert np.array_equal(shuffled.row_nodes[place], tree.row_nodes[index])


@settings(deadline=None)
@given(grouped_rows(), st.integers(1, 20))
def test_packs_hold_every_row_once_within_their_nodes(rows: Rows, nodes: int) -> None:
    trees = TokenTree.packs(rows, nodes=nodes)
    assert sorted(index for tree in trees for index in tree.rows) == list(range(len(rows)))
    for tree in trees:
        assert len(tree) <= nodes or len(tree.rows) == 1
        assert len(tree) == len(trie([rows[index] for index in tree.rows]))
        for index, path in zip(tree.rows, tree.row_nodes, strict=True):
            assert tree.ids[path].tolist() == rows[index].ids.tolist()
    terms = sorted((int(index), int(at)) for tree in trees for index, at in _pairs(tree))
    assert terms == sorted((int(index), int(at)) for index, at in _pairs(TokenTree.of(rows)))


def _pairs(tree: TokenTree) -> zip[tuple[np.int32, np.int32]]:
    return zip(tree.terms.row, tree.terms.position, strict=True)


@settings(deadline=None)
@given(grouped_rows(), st.integers(1, 20))
def test_no_other_cuts_of_the_ordered_rows_compute_less(rows: Rows, nodes: int) -> None:
    ordered = sorted(rows, key=lambda one: one.ids.tolist())
    costs = []
    for cuts in range(1 << max(len(rows) - 1, 0)):
        packs: list[Rows] = [[]]
        for place, one in enumerate(ordered):
            if place and cuts >> (place - 1) & 1:
                packs.append([])
            packs[-1].append(one)
        sizes = [len(trie(pack)) for pack in packs if pack]
        if all(size <= nodes or len(pack) == 1 for size, pack in zip(sizes, packs, strict=False)):
            costs.append((sum(sizes), len(sizes)))
    trees = TokenTree.packs(rows, nodes=nodes)
    assert (sum(map(len, trees)), len(trees)) == min(costs)


def test_groups_stay_whole_where_they_fit() -> None:
    texts = ["system A: 1", "system B: 1", "system A: 22", "system B: 22", "system C: 1", "system A: 3"]
    trees = TokenTree.packs(rows_of(texts), nodes=16)
    assert [tree.rows.tolist() for tree in trees] == [[0, 2, 5], [1, 3], [4]]


def test_fitting_groups_share_one_tree_and_prefix() -> None:
    (tree,) = TokenTree.packs(rows_of(["system A: 1", "system A: 2", "system B: 1"]), nodes=100)
    assert len(tree) == len("system A: 1") + len("2") + len("B: 1")


def test_rows_without_a_common_beginning_are_a_forest() -> None:
    tree = TokenTree.of(rows_of(["ab", "cd", "ab"]))
    assert tree.parents.tolist() == [-1, 0, -1, 2]
    assert tree.leave.tolist() == [2, 2, 4, 4]
    assert [path.tolist() for path in tree.row_nodes] == [[0, 1], [2, 3], [0, 1]]


def test_rows_stand_in_the_order_of_their_ids() -> None:
    assert TokenTree.of([row([300, 1]), row([2, 300]), row([2, 256])]).ids.tolist() == [2, 256, 300, 300, 1]


def test_a_row_longer_than_a_pack_is_a_tree_of_its_own() -> None:
    trees = TokenTree.packs(rows_of(["long and longer", "ab", "ac"]), nodes=3)
    assert [tree.rows.tolist() for tree in trees] == [[1, 2], [0]]


def test_rows_that_share_a_node_keep_their_own_numbers() -> None:
    first = row([1, 2, 3], [False, True, True], version=0)
    second = row([1, 2, 3], [False, False, True], version=7)
    terms = TokenTree.of([first, second]).terms
    assert terms.row.tolist() == [0, 0, 1]
    assert terms.versions.tolist() == [0, 0, 7]
    assert terms.logprobs.tolist() == [-1, -2, -702]
    assert terms.logit.tolist() == [0, 1, 1]


def test_a_term_finds_its_value_in_a_padded_batch() -> None:
    rows = rows_of(["abc", "abd", "x"])
    padded = np.zeros((3, 3))
    for index, one in enumerate(rows):
        padded[index, : len(one)] = one.ids * (index + 1)
    for tree in TokenTree.packs(rows, nodes=4):
        terms = tree.terms
        assert np.array_equal(padded[terms.row, terms.position], terms.target_id * (terms.row + 1))


def test_without_rows_there_is_no_pack_and_nothing_in_the_tree() -> None:
    assert TokenTree.packs([]) == []
    tree = TokenTree.of([])
    assert (len(tree), len(tree.terms), tree.mask().shape, tree.row_nodes) == (0, 0, (0, 0), ())
    assert tree.saving.ratio == 1.0


@pytest.mark.parametrize("nodes", [0, -5, "9", True])
def test_a_pack_without_room_is_refused(nodes: Any) -> None:
    with pytest.raises(BadOption, match=f"nodes={nodes!r}: a tree has at least 1 node"):
        TokenTree.packs(rows_of(["ab"]), nodes=nodes)


@pytest.mark.parametrize("make", [TokenTree.of, TokenTree.packs], ids=["one tree", "packs"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([group(made([prompt(1), said(2)]))], "Group"),
        ([made([prompt(1), said(2)])], "Trajectory"),
        (TrainingBatch.padded([made([prompt(1), said(2)])], pad_id=0), "TrainingBatch"),
        (iter(rows_of(["ab"])), "list_iterator"),
    ],
    ids=["groups", "trajectories", "a batch", "an iterator"],
)
def test_argument_other_than_rows_is_refused_with_how_to_get_rows(
    make: Callable[[Any], Any], given: Any, named: str
) -> None:
    with pytest.raises(BadBatch, match=rf"got {named}\. Give rows: Selection.of\(groups\).rows, or batch.rows"):
        make(given)


def test_the_saving_is_one_line() -> None:
    prompt = "a prompt of 26 characters."
    rows = rows_of([prompt + "one", prompt + "two", prompt + "thirteen", prompt + "one"])
    assert str(TokenTree.of(rows).saving) == (
        "4 rows as 1 tree: 39 nodes for 121 ids (3.1x), 136 padded (3.5x); logits at 36"
    )


def test_the_saving_of_packs_counts_what_is_computed_again() -> None:
    rows = rows_of(["abcd", "abce", "abcf"])
    saving = Saving.of(TokenTree.packs(rows, nodes=5))
    assert saving == Saving(rows=3, tokens=12, padded=12, nodes=9, logits=6, trees=2)
    assert saving.ratio == pytest.approx(12 / 9)
