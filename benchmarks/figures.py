"""Write the figures and tables of the README: run what it names and put the output between its markers.

    python benchmarks/figures.py            # all of them, on a quiet machine
    python benchmarks/figures.py demo       # one section

`chains` is the table of what is proved, made from recognize/chains.py. A section begins with
`<!-- figures: NAME -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the package is not installed

from lut4tool.recognize.chains import FORMS  # noqa: E402

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


def chains() -> str:
    """What is proved, as a table in Markdown."""
    rows = [("chain", "codes", "scales", "becomes"), ("---",) * 4]
    for form in FORMS:
        rows.append((form.chain + " (`--vendor`)" * form.vendor, form.codes, form.scales, f"`{form.op}`"))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def printed(command: list[str]) -> str:
    """What a command prints, under the command and the machine."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    said = " ".join(command).replace("-m lut4tool.cli", "lut4tool").replace("models/", "python models/")
    said = said.replace("benchmarks/", "python benchmarks/")
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join(["```", f"$ {said}    # {machine()}", *lines, "```"])


def main() -> None:
    """Replace each named section by what its command prints."""
    text = README.read_text()
    for name in sys.argv[1:] or ("chains", *COMMANDS):
        said = chains() if name == "chains" else printed(COMMANDS[name])
        block = f"<!-- figures: {name} -->\n{said}\n<!-- end -->"
        before, marker, rest = text.partition(f"<!-- figures: {name} -->")
        if not marker:
            raise SystemExit(f"README.md has no section '{name}'")
        text = before + block + rest.partition("<!-- end -->")[2]
    README.write_text(text)


if __name__ == "__main__":
    main()
