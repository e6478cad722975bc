"""Models of any size: time and peak memory of whole commands, on files that this script makes and removes.

    python benchmarks/scale.py                  # every section: 15 GB of disk, some minutes
    python benchmarks/scale.py big nodes        # some of them
    python benchmarks/scale.py --make big DIR   # only a section's files, kept

A model is a stack of pairs of NF4 products (up, Relu, down, Add) over random bytes, filled up with other nodes. Memory
is a whole process's, imports included: its peak, and its anonymous part (no pages of files), looked at every 10 ms.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this process stays small: a child's peak begins with its parent's size
    import onnx

GIB = 1 << 30
LUT4TOOL = [sys.executable, "-m", "lut4tool.cli"]


@dataclass(frozen=True)
class Size:
    """A model's measures.

    chains: how many, their weights [wide, narrow] and [narrow, wide] in turns; nodes: of the graph, at least;
    files: how many hold the data (0: it is inline); shared: all chains read one weight; fill: bytes of the file in the
    end (a doc_string makes it so long).
    """

    chains: int
    wide: int
    narrow: int
    block: int = 64
    nodes: int = 0
    files: int = 1
    shared: bool = False
    fill: int = 0


SIZES = {
    "big": Size(200, 10_496, 4_096, nodes=5_501),  # 4.5 GiB
    "verify": Size(16, 10_496, 4_096),
    "10k": Size(200, 64, 64, 32, nodes=10_000),
    "100k": Size(2_000, 64, 64, 32, nodes=100_000),
    "1M": Size(20_000, 64, 64, 32, nodes=1_000_000),
    "under": Size(98, 9_436, 4_096, files=0, fill=2 * GIB - 100_000),  # room for the operator's body
    "over": Size(1, 115_200, 32_768, files=0, fill=2 * GIB - 100),  # past protobuf's limit with the operator's body
    "files": Size(2_000, 64, 64, 32, files=4_000),
    "shared": Size(2_000, 2_048, 2_048, shared=True),
    "elements": Size(1, 65_600, 32_768),  # over 2^31 elements in one weight
}


class Data:
    """The data files of a model: tensors in turns, cut from one stretch of random bytes."""

    def __init__(self, folder: Path, files: int) -> None:
        import numpy as np

        self.paths = [folder / (f"weights-{index}.bin" if files > 1 else "weights.bin") for index in range(files)]
        self.random, self.placed = np.random.default_rng(0), 0
        self.noise = self.random.bytes(96 << 20)
        self.scales = self.random.uniform(0.005, 0.01, 2 << 20).astype(np.float32).tobytes()

    def place(self, tensor: onnx.TensorProto, count: int) -> None:
        """Give a tensor `count` elements: bytes, or scales where it is FLOAT."""
        tensor.dims[:] = [count]
        source, size = (self.noise, count) if tensor.data_type == tensor.UINT8 else (self.scales, 4 * count)
        start = 64 * int(self.random.integers(0, 1 << 14))
        pieces = [source[start : start + size]]
        while size > sum(map(len, pieces)):
            pieces.append(source[: size - sum(map(len, pieces))])
        if not self.paths:
            tensor.raw_data = b"".join(pieces)
            return
        path = self.paths[self.placed % len(self.paths)]
        self.placed += 1
        with path.open("ab") as file:
            file.write(bytes(-file.tell() % 64))
            entries = {"location": path.name, "offset": file.tell(), "length": size}
            file.writelines(pieces)
        tensor.ClearField("raw_data")
        tensor.data_location = tensor.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))


def make(size: Size, folder: Path) -> None:
    """Write in.onnx and its data into a folder."""
    from onnx import TensorProto, helper

    folder.mkdir(parents=True, exist_ok=True)
    nodes, tensors, value = _layers(size, folder)
    for index in range(len(nodes), size.nodes):
        nodes.append(helper.make_node("Neg", [value], [f"more{index}"], f"Neg{index}"))
        value = f"more{index}"
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["rows", None])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", size.narrow])]
    graph = helper.make_graph(nodes, "stack", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for less in (16, 0) if size.fill else ():
        model.doc_string += "." * (size.fill - model.ByteSize() - less)
    (folder / "in.onnx").write_bytes(model.SerializeToString())


def _layers(size: Size, folder: Path) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], str]:
    """The products with their chains: nodes, tensors and the last value."""
    import numpy as np
    from onnx import helper

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from build import Chain, spell

    data, nodes, tensors, value = Data(folder, size.files), [], {}, "x"
    empty = {"packed": np.empty(0, np.uint8), "scales": np.empty(0, np.float32)}
    spelling = {"perm": "written", "literals": "constant", "step": False, "leaf_prefix": "" if size.shared else None}
    blocks = -(-size.wide * size.narrow // size.block)
    for index in range(size.chains):
        prefix, up = f"layer{index}/", index % 2 == 0
        shape = (size.wide, size.narrow) if up else (size.narrow, size.wide)
        parts = spell(Chain(*shape, size.block, prefix=prefix, **spelling, **empty))
        for tensor in parts.tensors:
            if tensor.name not in tensors:
                tensors[tensor.name] = tensor
                if not tensor.name.endswith("codebook"):
                    data.place(tensor, blocks * size.block // 2 if tensor.name.endswith("packed") else blocks)
        nodes += [*parts.nodes, helper.make_node("MatMul", [value, parts.weight], [f"{prefix}y"], f"{prefix}MatMul")]
        if up:
            skipped, ending = value, helper.make_node("Relu", [f"{prefix}y"], [f"{prefix}out"], f"{prefix}Relu")
        else:
            ending = helper.make_node("Add", [skipped, f"{prefix}y"], [f"{prefix}out"], f"{prefix}Add")
        nodes.append(ending)
        value = f"{prefix}out"
    return nodes, list(tensors.values()), value


@dataclass(frozen=True)
class Cost:
    """What a command took: seconds of the wall and of processors, megabytes at the peak, anonymous ones, its output."""

    seconds: float
    processor: float
    peak: float
    anonymous: float
    output: str


def measure(arguments: list[str], accepted: tuple[int, ...] = (0,)) -> Cost:
    """Run a command; its processes below it count for time, not for memory."""
    start, largest = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(arguments, stdout=output, stderr=errors, text=True)
        while True:
            largest = max(largest, _anonymous(process.pid))
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode not in accepted:
            raise SystemExit(f"{' '.join(arguments)}: exit {process.returncode}: {errors.read()}")
        peak = usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        return Cost(seconds, usage.ru_utime + usage.ru_stime, peak, largest / 1e3, output.read())


def _anonymous(process: int) -> int:
    """Anonymous kilobytes of a process now; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)


def rewrite(source: Path, target: Path, *flags: str) -> Cost:
    """`lut4tool rewrite`, which must rewrite."""
    return measure([*LUT4TOOL, "rewrite", str(source), str(target), "--force", "--json", *flags])


def show(what: str, cost: Cost, *more: str) -> None:
    """Print one row."""
    facts = f"{cost.seconds:8.2f} {cost.processor:8.2f} {cost.peak:8.0f} {cost.anonymous:8.0f}"
    print(f"{what:<44} {facts}  {', '.join(more)}".rstrip(), flush=True)


def big(folder: Path) -> None:
    """4.5 GiB beside the model: into the same folder, into another one, and run."""
    source, other = folder / "in.onnx", folder / "other"
    weights = folder / "weights.bin"
    gibibytes = f"{weights.stat().st_size / GIB:.2f} GiB"
    show(f"{gibibytes} external, the same folder", rewrite(source, folder / "out.onnx"))
    other.mkdir()
    copied = min((measure(["cp", str(weights), str(other / "copy")]) for _ in range(2)), key=lambda cost: cost.seconds)
    show("  cp of the data", copied)
    (other / "copy").unlink()
    synced = measure(["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(weights), str(other / "copy")])
    show("  cp and sync of the data", synced)
    (other / "copy").unlink()
    moved = rewrite(source, other / "out.onnx")
    show(
        "  another folder",
        moved,
        f"{moved.seconds / copied.seconds:.2f} x cp, {moved.seconds / synced.seconds:.2f} x cp and sync",
    )
    shutil.rmtree(other)
    ran = measure([*LUT4TOOL, "run", str(folder / "out.onnx"), "--random", "--dim", "rows=1", "--json"])
    show("  run, one row", ran, "kernels " + ", ".join({row["kernel"] for row in json.loads(ran.output)["kernels"]}))


def verify(folder: Path) -> None:
    """Every block compared."""
    megabytes = (folder / "weights.bin").stat().st_size / 1e6
    base = rewrite(folder / "in.onnx", folder / "out.onnx")
    show(f"{megabytes:.0f} MB packed, sampled", base)
    cost = rewrite(folder / "in.onnx", folder / "out.onnx", "--verify")
    rate = megabytes / (cost.processor - base.processor)
    show("  --verify, every block by onnx.reference", cost, f"{rate:.1f} MB a second of a core")


def plain(folder: Path) -> None:
    """The same folder."""
    sizes = [path.stat().st_size for path in folder.iterdir()]
    source = folder / "in.onnx"
    cost = rewrite(source, folder / "out.onnx")
    document = json.loads(cost.output)
    what = f"{folder.name}: {len(document['rewritten'])} products, {source.stat().st_size / 1e6:.0f} MB"
    if len(sizes) > 1:
        what += f" and {sum(sizes) / 1e6 - source.stat().st_size / 1e6:.0f} MB in {len(sizes) - 1} files"
    show(what, cost, *document["notes"])


SECTIONS: dict[str, tuple[tuple[str, ...], Callable[[Path], None]]] = {
    "big": (("big",), big),
    "verify": (("verify",), verify),
    "nodes": (("10k", "100k", "1M"), plain),
    "inline": (("under", "over"), plain),
    "files": (("files",), plain),
    "shared": (("shared",), plain),
    "elements": (("elements",), plain),
}


def main() -> None:
    """Print a row a command."""
    if sys.argv[1:2] == ["--make"]:
        return make(SIZES[sys.argv[2]], Path(sys.argv[3]))
    print(f"{'':<44} {'seconds':>8} {'cpu s':>8} {'peak MB':>8} {'anon MB':>8}")
    for section in sys.argv[1:] or SECTIONS:
        names, report = SECTIONS[section]
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                measure([sys.executable, __file__, "--make", name, f"{scratch}/{name}"])
                report(Path(scratch, name))
    return None


if __name__ == "__main__":
    main()
