"""Writes the synthetic model of the demonstration: a transformer block with forward and adjoint 4-bit chains.

python models/make.py block.onnx [--dim 1024] [--hidden 2816] [--block-size 64] [--codebook nf4] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from lut4tool.demo import build_block
from lut4tool.encode import load_codebook
from lut4tool.errors import Lut4Error
from lut4tool.storage import write_atomic


def main(arguments: list[str] | None = None) -> int:
    """Write the model that the arguments describe."""
    parser = argparse.ArgumentParser(description="Write a transformer block with 4-bit chains, forward and adjoint.")
    parser.add_argument("target", type=Path, help="where to write the .onnx file")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--codebook", default="nf4", help="nf4, fp4 or a file of 16 numbers")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    try:
        codebook = load_codebook(chosen.codebook)
        model = build_block(chosen.dim, chosen.hidden, chosen.block_size, codebook, chosen.seed)
        write_atomic(chosen.target, model.SerializeToString(deterministic=True))
    except Lut4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {chosen.target}: {chosen.target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
