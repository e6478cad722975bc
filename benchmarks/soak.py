"""What takes long: kills, fuzz, thousands of runs, models of any size; their figures go to docs/reliability.md.

    make soak                              # all of it: an hour on a quiet machine with 15 GB of free disk
    python benchmarks/soak.py kills runs   # some sections

A section begins with `<!-- figures: NAME -->` and ends with `<!-- end -->`. One that fails is said, and not written.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from figures import ROOT, machine

PAGE = ROOT / "docs" / "reliability.md"
PYTEST = ["-m", "pytest", "-q", "-m", "slow", "--durations=0", "-p", "no:cacheprovider"]
COMMANDS = {
    "kills": [*PYTEST, "tests/rewrite/test_faults.py"],
    "hostile": [*PYTEST, "tests/commands/test_hostile.py"],
    "fuzz": [*PYTEST, "-rP", "tests/commands/test_fuzz_files.py"],
    "runs": [*PYTEST, "tests/rewrite/test_concurrency.py"],
    "weight": [*PYTEST, "tests/rewrite/test_size.py"],
    "big": ["benchmarks/scale.py", "big"],
    "verify": ["benchmarks/scale.py", "verify"],
    "nodes": ["benchmarks/scale.py", "nodes"],
    "shapes": ["benchmarks/scale.py", "inline", "files", "shared", "elements"],
}


def result(lines: list[str]) -> list[str]:
    """What is kept of a command's output: of pytest, a line a test, what tests say of their runs, and the last one."""
    tests = re.compile(r"(?P<seconds>[\d.]+s) call +tests/(?P<name>.*)")
    found = [match for line in lines if (match := tests.match(line.strip()))]
    if not found:
        return lines
    tests_say = [line for line in lines if line.startswith("fuzz: ")]
    return [f"{match['seconds']:>9}  {match['name']}" for match in found] + tests_say + [lines[-1]]


def main() -> None:
    """Run sections and write those that pass."""
    failed = []
    for name in sys.argv[1:] or COMMANDS:
        command, when = COMMANDS[name], time.strftime("%Y-%m-%d")
        load = f"load {os.getloadavg()[0]:.0f} before it"
        done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        print("\n".join(lines), flush=True)
        if done.returncode:
            failed.append(name)
            continue
        said = f"$ python {' '.join(command)}    # {machine()}, {load}, {when}"
        block = [f"<!-- figures: {name} -->", "```", said, *result(lines), "```", "<!-- end -->"]
        before, marker, rest = PAGE.read_text().partition(f"<!-- figures: {name} -->")
        if not marker:
            raise SystemExit(f"{PAGE} has no section '{name}'")
        PAGE.write_text(before + "\n".join(block) + rest.partition("<!-- end -->")[2])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
