"""Rewriting: prove each 4-bit decode chain, check it with a witness, replace it, save atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from lut4tool.errors import Lut4Error
from lut4tool.recognize import recognize
from lut4tool.recognize.layout import LayoutError
from lut4tool.recognize.proof import Proof, Refusal, Report, Witness
from lut4tool.recognize.summary import advise, distinct_weights
from lut4tool.rewrite.drawing import Surroundings, surroundings
from lut4tool.rewrite.edit import RewriteError, apply
from lut4tool.rewrite.save import (
    Progress,
    check_target,
    data_bytes,
    fill,
    laid_out,
    point_out,
    serialized,
)
from lut4tool.rewrite.save import save as save_model
from lut4tool.storage import PathLike, Tensors, read_model, size_text, with_data

__all__ = ["RewriteError", "RewriteReport", "rewrite", "rewrite_model"]


@dataclass(frozen=True, eq=False, repr=False)
class RewriteReport:
    """What a rewrite did, site by site; sizes in bytes, each distinct weight counted once.

    rewritten: proof and witness of each site (None where no witness was asked for).
    refused: the sites that cannot be rewritten; differing: those of them whose proof its witness showed wrong. That is
        a fault of lut4tool: nothing is rewritten, and the command line ends with 4.
    input_bytes, output_bytes: the proto's file before and after, external data not counted; 0 where none was written
        (on `dry_run`, what it would be). input_data_bytes, output_data_bytes: the external data that each uses.
    packed_bytes, dense_bytes: the proved weights as stored, and decoded to float32.
    notes: sentences for the user.
    surroundings: of each site before the rewrite, where they were asked for: what page.page draws.
    """

    rewritten: tuple[tuple[Proof, Witness | None], ...]
    refused: tuple[Refusal, ...]
    packed_bytes: int
    dense_bytes: int
    input_bytes: int = 0
    output_bytes: int = 0
    notes: tuple[str, ...] = ()
    surroundings: tuple[Surroundings, ...] = ()
    differing: tuple[Refusal, ...] = ()
    input_data_bytes: int = 0
    output_data_bytes: int = 0

    def __str__(self) -> str:
        """What the command's last lines say."""
        counts = f"{len(self.rewritten)} rewritten, {len(self.refused)} refused"
        return f"{counts}; {self.sizes}" if self.rewritten else counts

    def __repr__(self) -> str:
        return f"<RewriteReport: {self}>"

    @property
    def sizes(self) -> str:
        """The sizes in one line: of the files, where there are any, and of the weights."""
        weights = f"weights {size_text(self.packed_bytes)} packed, {size_text(self.dense_bytes)} if decoded"
        if not self.output_bytes:
            return weights
        after = with_data(self.output_bytes, self.output_data_bytes)
        return f"{after} (was {with_data(self.input_bytes, self.input_data_bytes)}); {weights}"

    def to_json(self) -> dict[str, Any]:
        """The document of `rewrite --json` (DESIGN section 7)."""
        return {
            "rewritten": [
                proof.to_json() | {"witness": witness.to_json() if witness else None}
                for proof, witness in self.rewritten
            ],
            "refused": [refusal.to_json() for refusal in self.refused],
            "differing": [refusal.to_json() for refusal in self.differing],
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "input_data_bytes": self.input_data_bytes,
            "output_data_bytes": self.output_data_bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.dense_bytes,
            "notes": list(self.notes),
        }


def rewrite(
    src: PathLike,
    dst: PathLike,
    *,
    verify: bool = False,
    dry_run: bool = False,
    vendor: bool = False,
    force: bool = False,
    allow_external: Iterable[PathLike] = (),
    drawn: bool = False,
    progress: Progress | None = None,
) -> RewriteReport:
    """Rewrite the model file `src` to `dst`; `dst` equal to `src` means in place.

    Every distinct weight is checked by a witness first (`verify`: every block of it). Where one differs, nothing is
    rewritten; a site whose codes have no entry is refused alone. Nothing is written where nothing is rewritten, on
    `dry_run`, or on any error. `drawn`: the report holds each site's surroundings.
    `progress(what, done, total)` is called now and then.
    Raises StorageError for files (external data that cannot be read is one), RewriteError for a place or a model.
    """
    source, target = Path(src), os.fspath(dst)
    tensors = Tensors(source.parent, allow_external)
    tensors.note(source)
    model = read_model(source)
    size = source.stat().st_size
    check_target(str(source), target, force or dry_run)
    data = data_bytes(model, tensors)
    report = _checked(model, tensors, verify, vendor, True, drawn, progress)
    written, notes = 0, tuple[str, ...]()
    if not report.rewritten:
        notes = advise(model, Report((), report.refused))
        return replace(report, input_bytes=size, input_data_bytes=data, notes=notes)
    added = apply(model, [proof for proof, _ in report.rewritten])
    if dry_run:
        point_out(added, target)
        fill(added, tensors)
        written = len(serialized(model) or b"")
    else:
        written, notes = save_model(model, str(source), target, tensors, progress, added)
    report = replace(report, input_data_bytes=data, output_data_bytes=data_bytes(model))
    return replace(report, input_bytes=size, output_bytes=written, notes=notes)


def rewrite_model(
    model: onnx.ModelProto,
    tensors: Tensors,
    *,
    verify: bool = False,
    vendor: bool = False,
    witness: bool = True,
    drawn: bool = False,
    progress: Progress | None = None,
) -> RewriteReport:
    """Rewrite a model in place in memory, as `rewrite` does with files; `tensors` reads its weights.

    On an error the model is as it was.
    """
    report = _checked(model, tensors, verify, vendor, witness, drawn, progress)
    proofs = [proof for proof, _ in report.rewritten]
    data = laid_out(proofs, tensors)  # before any change, since it may fail
    for new in apply(model, proofs):
        new.tensor.raw_data = data[new.proof.tensor_key(new.role)]
    return report


def _checked(
    model: onnx.ModelProto,
    tensors: Tensors,
    verify: bool,
    vendor: bool,
    witness: bool,
    drawn: bool,
    progress: Progress | None,
) -> RewriteReport:
    """What a rewrite will do, each proof checked by a witness."""
    found = recognize(model, vendor=vendor, tensors=tensors)
    checked = _witnesses(found.proofs, tensors, verify, progress) if witness else [None] * len(found.proofs)
    kept, refused, differing = [], list(found.refusals), list[Refusal]()
    for proof, seen in zip(found.proofs, checked, strict=True):
        if seen is None or isinstance(seen, Witness):
            kept.append((proof, seen))
            continue
        refused.append(Refusal(proof.site.name, str(seen), proof.site.name))
        if not isinstance(seen, LayoutError):
            differing.append(refused[-1])
    if differing:  # a proof was wrong: none is believed
        kept = []
    proofs = tuple(proof for proof, _ in kept)
    distinct = distinct_weights(proofs)
    return RewriteReport(
        tuple(kept),
        tuple(refused),
        sum(proof.nbytes for proof in distinct),
        sum(4 * proof.rows * proof.cols for proof in distinct),
        surroundings=tuple(surroundings(model, proofs)) if drawn else (),
        differing=tuple(differing),
    )


def _witnesses(
    proofs: tuple[Proof, ...], tensors: Tensors, verify: bool, progress: Progress | None
) -> list[Witness | Lut4Error]:
    """One witness a proof, or what it found wrong; sites that share a chain share the check."""
    from lut4tool.recognize.verify import check_every, check_some  # imports onnx.reference

    chains = {tuple(map(id, proof.chain)): proof for proof in reversed(proofs)}
    distinct = dict(reversed(chains.items()))
    checked = (check_every if verify else check_some)(list(distinct.values()), tensors, progress)
    if not all(isinstance(seen, Witness) for seen in checked):
        tensors.check_unchanged()  # or it is no fault of ours
    found = dict(zip(distinct, checked, strict=True))
    return [found[tuple(map(id, proof.chain))] for proof in proofs]
