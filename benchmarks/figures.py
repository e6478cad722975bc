"""Write the figures of the README: run what it names and put the output between its markers.

    python benchmarks/figures.py            # all of them, on a quiet machine
    python benchmarks/figures.py demo       # one section

A section begins with `<!-- figures: NAME -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

COMMANDS = {
    "demo": ["-m", "lut4tool.cli", "demo"],
    "real": ["models/real_case.py"],
    "rewrite": ["benchmarks/rewrite.py", "12", "100"],
}


def machine() -> str:
    """Processor and system in one line."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def main() -> None:
    """Replace each named section by what its command prints."""
    text = README.read_text()
    for name in sys.argv[1:] or COMMANDS:
        command = COMMANDS[name]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
        lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
        said = " ".join(command).replace("-m lut4tool.cli", "lut4tool").replace("models/", "python models/")
        said = said.replace("benchmarks/", "python benchmarks/")
        block = "\n".join(
            [f"<!-- figures: {name} -->", "```", f"$ {said}    # {machine()}", *lines, "```", "<!-- end -->"]
        )
        before, marker, rest = text.partition(f"<!-- figures: {name} -->")
        if not marker:
            raise SystemExit(f"README.md has no section '{name}'")
        text = before + block + rest.partition("<!-- end -->")[2]
    README.write_text(text)


if __name__ == "__main__":
    main()
