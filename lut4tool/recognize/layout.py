"""How a proved weight lies: what its node will hold, from which constants, and how both are cut into units."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lut4tool.errors import Lut4Error
from lut4tool.formats import DTYPE_NAME, LOOKUP4_MATMUL, FormatError, Lookup4Weight, QmmWeight
from lut4tool.storage import Tensors

if TYPE_CHECKING:
    from lut4tool.recognize.proof import Proof


class LayoutError(Lut4Error):
    """Constants that the proved chain itself could not be run on."""


#: Elements laid out at a time: with unpacked int64 codes a piece reads 32 MB and writes 2 MB.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Laid:
    """A tensor of the new node that the model does not hold: laid out, exactly, from constants that the chain reads.

    make: called with the arrays of `sources` and then `settings`; a pure function of the module, so that equal calls on
        equal tensors are one tensor. Where Cut.axes names a source it also gets that source cut to some units, and must
        give the same units of the tensor (along axis 0). Raises FormatError for values that have no layout.
    data_type: of onnx.TensorProto; shape: of the whole tensor.
    view: these are the bytes of its one source in another shape, so that they stay where they are.
    partial: some values of the sources have no layout.
    """

    make: Callable[..., np.ndarray]
    sources: tuple[str, ...]
    settings: tuple[Hashable, ...]
    data_type: int
    shape: tuple[int, ...]
    view: bool = False
    partial: bool = False


def flattened(array: np.ndarray) -> np.ndarray:
    """The same elements, flat."""
    return array.reshape(-1)


class Axis(NamedTuple):
    """How a source is cut: along which axis, and how many elements of the weight each entry there serves.

    rows: a flat source is cut as if it were [rows, ...], along axis 1.
    """

    axis: int
    shared: int
    rows: int = 0


class Folded(NamedTuple):
    """A role that holds a value of the chain, flat: as it is (rows 1), or its transpose from [rows, ...]."""

    role: str
    rows: int = 1


@dataclass(frozen=True)
class Cut:
    """How a chain too large to be run whole is run, and its weight laid out, on some of its units only.

    A unit of a lookup is so many flat elements of W that they begin and end with a block or lie in one; or, with
    `rows`, whole rows of the new weight, as always for QMM (one): `output` is the chain's weight then.

    count, size: units, and the elements of each; the last may reach past the weight.
    output, dtype: the value that the chain is run to, and its type.
    axes: the sources that are cut, and how.
    shapes: by output, the Reshapes whose target counts units: the target to take, with -1 in that place.
    folded: values inside the chain that a role holds. They are run and compared whole, then cut as sources are.
    """

    count: int
    size: int
    output: str
    dtype: str
    axes: Mapping[str, Axis]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    folded: Mapping[str, Folded] = field(default_factory=dict)
    rows: bool = False


def take(array: np.ndarray, along: Axis, units: np.ndarray, size: int) -> np.ndarray:
    """The entries of `units` (ascending), of `size` elements each; a view where they adjoin."""
    along = Axis(*along)
    if along.rows:  # a view, cut, and flat again
        return take(array.reshape(along.rows, -1), Axis(1, along.shared), units, size).reshape(-1)
    axis, shared = along.axis, along.shared
    length = array.shape[axis]
    before: tuple[Any, ...] = (slice(None),) * axis
    if shared > size:
        return array[(*before, units * size // shared)]
    entries = size // shared
    if units[-1] - units[0] + 1 == len(units):
        return array[(*before, slice(units[0] * entries, min((units[-1] + 1) * entries, length)))]
    index = (units[:, None] * entries + np.arange(entries)).reshape(-1)
    return array[(*before, index[index < length])]


class Layout:
    """One proof's weight on its real constants, whole or in units. Raises StorageError where they cannot be read."""

    def __init__(self, proof: Proof, tensors: Tensors) -> None:
        self.proof = proof
        self._tensors = tensors
        self._fixed: dict[str, np.ndarray] = {}  # roles that are not laid out in units

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The chain's sources by name."""
        return {name: self._tensors.array(tensor) for name, tensor in self.proof.sources.items()}

    def cut(self, arrays: Mapping[str, np.ndarray], units: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays by name, those that Cut.axes names cut to some units."""
        cut = self.proof.cut
        for tensor in self.proof.sources.values():
            self._tensors.touch(tensor)
        axes = {} if cut is None else cut.axes
        return {
            name: take(array, axes[name], units, cut.size) if cut is not None and name in axes else array
            for name, array in arrays.items()
        }

    def role(self, role: str, units: np.ndarray | None = None) -> np.ndarray:
        """What the new node holds as `role`: whole, or of some units."""
        held = self.proof.roles[role]
        if units is not None and self._in_units(held):
            return self._made(held, self.cut(self.arrays, units))
        if role not in self._fixed:
            self._fixed[role] = self._made(held, self.arrays)
        array, cut = self._fixed[role], self.proof.cut
        if units is None or cut is None or role == "codebook" or (role == "zero_points" and array.shape == (1, 1)):
            return array
        shared = {"packed": 2, "scales": self.proof.block_size} if self.proof.op == LOOKUP4_MATMUL else {}
        return take(array, Axis(0, shared.get(role, cut.size)), units, cut.size)

    def weight(self, units: np.ndarray | None = None) -> Lookup4Weight | QmmWeight:
        """The weight as the new node's attributes describe it: whole, or some units of it as a row each."""
        facts: Mapping[str, Any] = self.proof.attributes
        roles, cut = {role: self.role(role, units) for role in self.proof.roles}, self.proof.cut
        if self.proof.op != LOOKUP4_MATMUL:
            columns = facts["N"] if units is None else len(units)
            return QmmWeight(**roles, K=facts["K"], N=columns, block_size=facts["block_size"], bits=facts["bits"])
        sizes = facts["rows"], facts["cols"], facts["block_size"]
        weight_dtype = DTYPE_NAME[facts["weight_dtype"]]
        if units is not None and cut is not None:
            elements = len(units) * cut.size
            if cut.rows:
                sizes = elements // facts["cols"], facts["cols"], facts["block_size"]
            else:
                sizes, weight_dtype = (len(units), cut.size, min(cut.size, facts["block_size"])), cut.dtype
            missing = elements // 2 - roles["packed"].size  # a last unit that is cut short
            roles["packed"] = np.pad(roles["packed"].reshape(-1), (0, missing)) if missing > 0 else roles["packed"]
        return Lookup4Weight(
            roles["packed"].reshape(-1),
            roles["scales"].reshape(-1),
            roles["codebook"],
            *sizes,
            perm=tuple(facts["perm"]),
            high_nibble_first=bool(facts["high_nibble_first"]),
            weight_dtype=weight_dtype,
        )

    def require_values(self) -> None:
        """Raise LayoutError where a constant holds a value that has no layout: all of what may hold one is read."""
        for role, held in self.proof.roles.items():
            if isinstance(held, Laid) and held.partial:
                for _ in self.pieces(role):
                    self._tensors.release()

    def pieces(self, role: str) -> Iterator[np.ndarray]:
        """The whole array of a role that is laid out, in order and in pieces of a few megabytes."""
        cut = self.proof.cut
        if cut is None or not self._in_units(self.proof.roles[role]):
            yield self.role(role)
            return
        step = max(1, _PIECE_ELEMENTS // cut.size)
        for start in range(0, cut.count, step):
            yield self.role(role, np.arange(start, min(start + step, cut.count)))

    def _in_units(self, held: str | Laid) -> bool:
        cut = self.proof.cut
        return cut is not None and isinstance(held, Laid) and any(name in cut.axes for name in held.sources)

    def _made(self, held: str | Laid, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        if isinstance(held, str):
            return arrays[held]
        try:
            return held.make(*(arrays[name] for name in held.sources), *held.settings)
        except FormatError as error:
            raise LayoutError(f"the weight of '{self.proof.site.name}' cannot be laid out: {error}") from error
