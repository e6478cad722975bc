"""Ensembles of decision trees (onnx/defs/traditionalml): all rows walk down a tree together, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lut4tool.runtime.ops.models import classified, labels_of, transformed
from lut4tool.runtime.registry import op

DOMAIN = "ai.onnx.ml"
Ints = Sequence[int] | None
Floats = Sequence[float] | None
Strings = Sequence[str] | None

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_MEMBER = 6
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes of all trees: what each compares, and its two children; a child below 0 is leaf ~child.

    roots: a node or ~leaf a tree; weights: [leaves, targets], NaN where a leaf says nothing of a target.
    """

    roots: Sequence[int]
    features: np.ndarray
    modes: np.ndarray
    splits: np.ndarray
    members: dict[int, set[float]]
    missing: np.ndarray
    children: np.ndarray  # [nodes, 2]: false, true
    weights: np.ndarray

    def hits(self, x: np.ndarray) -> np.ndarray:
        """The weights [rows, trees, targets] of the leaves that the rows of x [rows, features] reach."""
        if self.features.size and int(self.features.max()) >= x.shape[1]:
            raise ValueError(f"the trees look at feature {int(self.features.max())}; a row has {x.shape[1]}")
        leaves = np.stack([self._leaves(x, root) for root in self.roots], axis=1)
        return self.weights[leaves]

    def _leaves(self, x: np.ndarray, root: int) -> np.ndarray:
        at = np.full(len(x), root)
        for _ in range(len(self.features) + 1):
            rows = np.flatnonzero(at >= 0)
            if not rows.size:
                return ~at
            nodes = at[rows]
            at[rows] = self.children[nodes, self._taken(x[rows, self.features[nodes]], nodes).astype(int)]
        raise ValueError("the nodes of a tree form a cycle")

    def _taken(self, values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Whether each value takes its node's true branch."""
        modes, taken = self.modes[nodes], np.zeros(len(nodes), bool)
        for mode in np.unique(modes).tolist():
            chosen = modes == mode
            if mode == _MEMBER:
                pairs = zip(values[chosen].tolist(), nodes[chosen].tolist(), strict=True)
                taken[chosen] = [value in self.members[node] for value, node in pairs]
            else:
                taken[chosen] = _COMPARE[mode](values[chosen], self.splits[nodes[chosen]])
        return taken | (np.isnan(values) & self.missing[nodes])


def _combined(hits: np.ndarray, how: str) -> np.ndarray:
    """The weights [rows, trees, targets] of all trees as one score a target, 0 where no leaf says anything."""
    none = np.isnan(hits)
    if how in ("MIN", "MAX"):
        extreme, far = (np.min, np.inf) if how == "MIN" else (np.max, -np.inf)
        return np.where(none.all(axis=1), 0, extreme(np.where(none, far, hits), axis=1))
    total = np.where(none, 0, hits).sum(axis=1)
    return total / hits.shape[1] if how == "AVERAGE" else total


@op("TreeEnsemble", domain=DOMAIN, host=(0,), on_host=True)
def tree_ensemble(
    x: Any, *, aggregate_function: int = 1, leaf_targetids: Sequence[int], leaf_weights: Any,
    membership_values: Any = None, n_targets: int | None = None,
    nodes_falseleafs: Sequence[int], nodes_falsenodeids: Sequence[int],
    nodes_featureids: Sequence[int], nodes_hitrates: Any = None,
    nodes_missing_value_tracks_true: Ints = None, nodes_modes: Any, nodes_splits: Any,
    nodes_trueleafs: Sequence[int], nodes_truenodeids: Sequence[int], post_transform: int = 0,
    tree_roots: Sequence[int],
) -> Any:  # fmt: skip
    """Leaf weights summed, averaged, or their extreme, per target, of the trees that each row [F] walks down."""
    weights = np.full((len(leaf_targetids), n_targets or 1), np.nan)
    weights[np.arange(len(leaf_targetids)), leaf_targetids] = np.asarray(leaf_weights, np.float64)
    leaf = np.array([nodes_falseleafs, nodes_trueleafs]).T.astype(bool)
    children = np.array([nodes_falsenodeids, nodes_truenodeids]).T
    modes = np.asarray(nodes_modes).astype(int)
    forest = Forest(
        tree_roots, np.array(nodes_featureids), modes, np.asarray(nodes_splits), _members(modes, membership_values),
        _flags(nodes_missing_value_tracks_true, len(modes)), np.where(leaf, ~children, children), weights,
    )  # fmt: skip
    scores = _combined(forest.hits(x), _AGGREGATES[aggregate_function])
    return transformed(scores, _TRANSFORMS[post_transform]).astype(x.dtype)


def _flags(values: Ints, count: int) -> np.ndarray:
    return np.array(values or [0] * count, bool)


def _members(modes: np.ndarray, values: Any) -> dict[int, set[float]]:
    """The set of each membership node: the values between NaNs, in the order of the nodes."""
    sets: list[set[float]] = [set()]
    for value in () if values is None else np.asarray(values).tolist():
        if value != value:
            sets.append(set())
        else:
            sets[-1].add(value)
    return dict(zip(np.flatnonzero(modes == _MEMBER).tolist(), sets, strict=False))


def _forest(
    targets: int, trees: Sequence[int], nodes: Sequence[int], features: Sequence[int], modes: Sequence[str],
    splits: Any, false: Sequence[int], true: Sequence[int], missing: Ints,
    weight_trees: Sequence[int], weight_nodes: Sequence[int], weight_targets: Sequence[int], weights: Any,
) -> Forest:  # fmt: skip
    """A forest whose leaves are nodes too, named by (tree, node), each with weights of several targets."""
    place = {key: index for index, key in enumerate(zip(trees, nodes, strict=True))}
    leaf = np.array([mode == "LEAF" for mode in modes], bool)

    def child(tree: int, node: int) -> int:
        index = place[tree, node]
        return ~index if leaf[index] else index

    children = np.zeros((len(nodes), 2), int)
    for index in np.flatnonzero(~leaf).tolist():
        children[index] = child(trees[index], false[index]), child(trees[index], true[index])
    table = np.full((len(nodes), targets), np.nan)
    for tree, node, target, weight in zip(weight_trees, weight_nodes, weight_targets, weights, strict=True):
        index = place[tree, node]
        table[index, target] = weight + (0 if np.isnan(table[index, target]) else table[index, target])
    roots = [child(tree, nodes[list(trees).index(tree)]) for tree in dict.fromkeys(trees)]
    looked_at = np.where(leaf, 0, np.array(features))
    kinds = np.array([_MODES.index(mode) for mode in modes])
    return Forest(roots, looked_at, kinds, np.asarray(splits), {}, _flags(missing, len(nodes)), children, table)


def _either(values: Any, tensor: Any) -> Any:
    """Numbers that come as float32 attributes or as a tensor."""
    if tensor is not None:
        return np.asarray(tensor)
    return None if values is None else np.array(values, np.float32)


def _compared(x: np.ndarray) -> np.ndarray:
    """Integers are compared as float32."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


@op("TreeEnsembleRegressor", domain=DOMAIN, host=(0,), on_host=True)
def tree_ensemble_regressor(
    x: Any, *, aggregate_function: str = "SUM", base_values: Floats = None, base_values_as_tensor: Any = None,
    n_targets: int | None = None, nodes_falsenodeids: Ints = None, nodes_featureids: Ints = None,
    nodes_hitrates: Floats = None, nodes_hitrates_as_tensor: Any = None,
    nodes_missing_value_tracks_true: Ints = None, nodes_modes: Strings = None, nodes_nodeids: Ints = None,
    nodes_treeids: Ints = None, nodes_truenodeids: Ints = None, nodes_values: Floats = None,
    nodes_values_as_tensor: Any = None, post_transform: str = "NONE", target_ids: Ints = None,
    target_nodeids: Ints = None, target_treeids: Ints = None, target_weights: Floats = None,
    target_weights_as_tensor: Any = None,
) -> Any:  # fmt: skip
    """Deprecated from version 5 on, and in use; base values are added after the aggregation."""
    forest = _forest(
        n_targets or 1, nodes_treeids or (), nodes_nodeids or (), nodes_featureids or (), nodes_modes or (),
        _either(nodes_values, nodes_values_as_tensor), nodes_falsenodeids or (), nodes_truenodeids or (),
        nodes_missing_value_tracks_true, target_treeids or (), target_nodeids or (), target_ids or (),
        _either(target_weights, target_weights_as_tensor),
    )  # fmt: skip
    scores = _combined(forest.hits(_compared(x)), aggregate_function)
    base = _either(base_values, base_values_as_tensor)
    scores = scores if base is None or not base.size else scores + base
    return transformed(scores, post_transform).astype(np.float32)


@op("TreeEnsembleClassifier", domain=DOMAIN, host=(0,), on_host=True)
def tree_ensemble_classifier(
    x: Any, *, base_values: Floats = None, base_values_as_tensor: Any = None, class_ids: Ints = None,
    class_nodeids: Ints = None, class_treeids: Ints = None, class_weights: Floats = None,
    class_weights_as_tensor: Any = None, classlabels_int64s: Ints = None, classlabels_strings: Strings = None,
    nodes_falsenodeids: Ints = None, nodes_featureids: Ints = None, nodes_hitrates: Floats = None,
    nodes_hitrates_as_tensor: Any = None, nodes_missing_value_tracks_true: Ints = None, nodes_modes: Strings = None,
    nodes_nodeids: Ints = None, nodes_treeids: Ints = None, nodes_truenodeids: Ints = None,
    nodes_values: Floats = None, nodes_values_as_tensor: Any = None, post_transform: str = "NONE",
) -> Any:  # fmt: skip
    """The class of the highest score; of two classes where leaves weigh only one, the other's score follows from it."""
    labels = labels_of(classlabels_int64s, classlabels_strings)
    weights = _either(class_weights, class_weights_as_tensor)
    forest = _forest(
        len(labels), nodes_treeids or (), nodes_nodeids or (), nodes_featureids or (), nodes_modes or (),
        _either(nodes_values, nodes_values_as_tensor), nodes_falsenodeids or (), nodes_truenodeids or (),
        nodes_missing_value_tracks_true, class_treeids or (), class_nodeids or (), class_ids or (), weights,
    )  # fmt: skip
    hits = forest.hits(_compared(x))
    scores, reached = _combined(hits, "SUM"), ~np.isnan(hits).all(axis=1)
    base = _either(base_values, base_values_as_tensor)
    weighed = sorted(set(class_ids or ()))
    if len(labels) == 2 and len(weighed) == 1:
        scores = scores[:, weighed] + (0 if base is None or not base.size else base[-1])
        return classified(scores, labels, post_transform, probabilities=bool((weights >= 0).all()))
    return classified(scores if base is None or not base.size else scores + base, labels, post_transform, reached)
