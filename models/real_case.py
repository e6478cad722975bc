"""The real case: two public models, quantized to NF4, rewritten with the witness, run, and compared with onnxruntime.

python models/real_case.py [--dir FOLDER]       exit status 1 where a result is more than 2e-5 of the largest value off
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from lut4tool.errors import Lut4Error
from lut4tool.measure import LUT4TOOL, OPTIMIZATIONS_OFF, difference, measure
from lut4tool.produce import quantize_file
from lut4tool.rewrite import rewrite
from lut4tool.storage import size_text
from models.feeds import feeds
from models.fetch import FetchError, fetch

NAMES = ("ocr-recogniser", "deepcut")
TOLERANCE = 2e-5  # of the largest value


def run_case(name: str, folder: Path) -> bool:
    """Quantize, rewrite and run one model in `folder`, print what came of it, and return whether results agree."""
    source, chains, packed = fetch(name), folder / f"{name}.nf4.onnx", folder / f"{name}.lut4.onnx"
    quantized = quantize_file(source, chains, codebook="nf4", block_size=64, force=True)
    report = rewrite(chains, packed, force=True)
    witnesses = [witness for _, witness in report.rewritten if witness]
    original = measure(chains, feeds(name), OPTIMIZATIONS_OFF)
    ours = measure(packed, feeds(name), LUT4TOOL)
    worst = difference(ours.outputs, original.outputs)
    kernels = sorted({kernel.split(": ", 1)[1] for kernel in ours.kernels})

    agree = worst <= TOLERANCE and len(report.rewritten) == len(quantized.quantized)
    compared, elements = (sum(getattr(w, count) for w in witnesses) for count in ("compared", "elements"))
    float_size, chain_size, packed_size = (size_text(path.stat().st_size) for path in (source, chains, packed))
    rows = {
        "quantized": f"{len(quantized.quantized)} weights to NF4, block 64; {len(quantized.left)} left",
        "rewritten": f"{len(report.rewritten)} products, {len(report.refused)} refused",
        "witness": f"{compared:,} of {elements:,} decoded weights compared",
        "file": f"{float_size} float, {chain_size} with chains, {packed_size} rewritten",
        "kernels": ", ".join(kernels) or "none",
        OPTIMIZATIONS_OFF: f"{original.run_milliseconds:.1f} ms, peak {size_text(original.peak_bytes)} (the chains)",
        LUT4TOOL: f"{ours.run_milliseconds:.1f} ms, peak {size_text(ours.peak_bytes)} (rewritten)",
        "agreement": f"largest difference / largest value {worst:.1e}, {TOLERANCE:g} allowed",
        "result": "agrees" if agree else "DIFFERS",
    }
    print(name)
    for heading, text in rows.items():
        print(f"  {heading:30}{text}")
    return agree


def main(arguments: list[str] | None = None) -> int:
    """Run every case; return 1 where one fails or differs."""
    parser = argparse.ArgumentParser(description="Quantize, rewrite and run two public models, and compare.")
    parser.add_argument("--dir", type=Path, help="keep the models here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            results = [run_case(name, folder) for name in NAMES]
        except (FetchError, Lut4Error) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
