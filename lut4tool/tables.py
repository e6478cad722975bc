"""What commands print of their documents: lines, and tables that fit the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from lut4tool.storage import size_text, with_data

#: The forms of a table, the widest first: its frame, cells between columns and at the ends, and the least of a name.
_FORMS: Sequence[tuple[box.Box | None, int, int, int | None]] = (
    (box.HEAVY_HEAD, 3, 4, None),
    (None, 2, 0, None),
    (None, 2, 0, 16),
)
_NO_BREAK = "\xa0"
#: What tells refusals of one kind apart: names in quotes and numbers.
_PARTICULARS = re.compile(r"'[^']*'|\d+")
#: A median over the best by more says that something else had the machine.
_BUSY = 2.0


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[int] = (0,)
) -> None:
    """Print rows of text as wide as the console at most: framed, without a frame, or each row as a few lines.

    names: columns whose texts may lose their middle. Figures are never cut.
    """
    if title:
        console.print(title)
    if not rows:
        return
    columns = list(zip(*rows, strict=True))
    for frame, between, ends, least in _FORMS:
        heads = [[heading] if frame else heading.split() for heading in headings]
        widths = [max(map(cell_len, (*cells, *head))) for head, cells in zip(heads, columns, strict=True)]
        room = console.width - between * (len(widths) - 1) - ends
        if least is not None:
            widths = _narrowed(widths, names, room, least)
        if sum(widths) <= room:
            console.print(_table(frame, headings, rows, widths))
            return
    for name, *figures in rows:
        facts = [f"{what} {figure}" for what, figure in zip(headings[1:], figures, strict=True) if figure]
        whole = ", ".join(fact.replace(" ", _NO_BREAK) for fact in facts)
        console.print(name)
        for line in textwrap.wrap(whole, max(console.width - 2, 20), break_long_words=False, break_on_hyphens=False):
            console.print("  " + line.replace(_NO_BREAK, " "))


def _table(frame: box.Box | None, headings: Sequence[str], rows: Sequence[Sequence[str]], widths: list[int]) -> Table:
    table = Table(box=frame, padding=(0, 1) if frame else (0, 2, 0, 0), pad_edge=frame is not None)
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, width=width, overflow="fold")
    for row in rows:
        table.add_row(*(shortened(text, width) for text, width in zip(row, widths, strict=True)))
    return table


def _narrowed(widths: Sequence[int], names: Sequence[int], room: int, least: int) -> list[int]:
    """Widths with the widest names made narrower, a cell at a time, until all fit or none may be narrower."""
    narrow = list(widths)
    while sum(narrow) > room:
        widest = max(names, key=lambda column: narrow[column])
        if narrow[widest] <= least:
            break
        narrow[widest] -= 1
    return narrow


def shortened(text: str, width: int) -> str:
    """The text, without its middle where it takes more than `width` cells."""
    if cell_len(text) <= width:
        return text
    head = tail = ""
    for at in range(len(text)):  # from both ends in turn; signs may be two cells wide
        grown = (head, text[len(text) - len(tail) - 1 :]) if at % 2 else (text[: len(head) + 1], tail)
        if cell_len("".join(grown)) > width - 3:
            break
        head, tail = grown
    return f"{head}...{tail}"


def print_sites(console: Console, document: dict[str, Any], key: str) -> None:
    """Print the table of proved sites and the sentence of each refusal."""
    if document[key]:
        headings = ["node", "operator", "rows x cols", "block", "weight type", "bytes"]
        headings += ["checked"] if key == "rewritten" else ["chain", "packed", "decoded", "onnxruntime"]
        rows = []
        for site in document[key]:
            row = [site["node"], site["op"], f"{site['rows']} x {site['cols']}"]
            row += [str(site["block_size"]), site["weight_dtype"], site["bytes"]]
            rows.append(row + (_checked(site) if key == "rewritten" else _costs(site)))
        print_table(console, f"{len(document[key])} {key}", headings, rows)
    for line in refusals(document["refused"]):
        console.print(line)


def refusals(refused: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each kind of refusal: those whose reasons differ in names, numbers and places alone are one kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for refusal in refused:
        kinds.setdefault(_PARTICULARS.sub("", refusal["reason"]), []).append(refusal)
    return [
        f"refused: {first['node']}: {first['reason']}"
        if not rest
        else f"refused: {len(rest) + 1} products, e.g. {first['node']}: {first['reason']}"
        for first, *rest in kinds.values()
    ]


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print what a user should know, as no error."""
    for note in notes:
        console.print(f"note: {note}")


def print_summary(console: Console, document: dict[str, Any]) -> None:
    """Print what `inspect` found: sites, operators, sizes, what to do next, and whether `run` serves the model."""
    print_sites(console, document, "found")
    for left in document["outside"]:
        console.print(f"outside of every product: {left['reason']}")
    console.print("operators: " + ", ".join(f"{name} {count}" for name, count in document["operators"].items()))
    console.print(f"file {size_text(document['file_bytes'])}, external data {size_text(document['external_bytes'])}")
    if document["found"]:
        console.print(
            f"weights of the found chains: {size_text(document['packed_bytes'])} packed,"
            f" {size_text(document['dense_bytes'])} once decoded as float32"
        )
    if document["onnxruntime_bytes"]:
        size = size_text(document["onnxruntime_bytes"])
        console.print(f"onnxruntime takes about {size} to fold them when it loads the model")
    for advice in document["advice"]:
        console.print(advice)
    if document["unsupported"] is None:
        console.print("whether `lut4tool run` serves it was not looked at: MLX does not load here")
    elif document["unsupported"]:
        count = len(document["unsupported"])
        console.print(f"`lut4tool run` does not serve it, for {count} reason{'s' * (count != 1)}:")
        for reason in document["unsupported"]:
            console.print(f"  {reason}")
    else:
        console.print("`lut4tool run` serves every operator of it")
    found, refused = len(document["found"]), len(document["refused"])
    chains = f"{found} chain{'s' * (found != 1)}" if found else "no 4-bit decode chain"
    console.print(f"{chains} found, {refused} refused")


def _checked(site: dict[str, Any]) -> list[str]:
    """How the witness of a rewritten site looked."""
    witness = site["witness"]
    return ["all elements" if witness["all"] else f"{witness['compared']:,} elements"]


def _costs(site: dict[str, Any]) -> list[str]:
    """The chain of a found site, and its weight's bytes: packed, decoded, and while onnxruntime loads it."""
    folded = site["onnxruntime_bytes"]
    theirs = "not folded" if folded is None else size_text(folded)
    return [site["chain"], size_text(site["packed_bytes"]), size_text(site["dense_bytes"]), theirs]


def print_expanded(console: Console, document: dict[str, Any], target: str) -> None:
    """Print what `expand` did."""
    for row in document["expanded"]:
        console.print(f"expanded {row['node']}: {row['op']}, {row['rows']} x {row['cols']}, {row['weight_dtype']}")
    for line in refusals(document["refused"]):
        console.print(line)
    print_notes(console, document["notes"])
    after = with_data(document["output_bytes"], document["output_data_bytes"])
    before = with_data(document["input_bytes"], document["input_data_bytes"])
    done = f"wrote {target}: {after} (was {before})"
    console.print(done if document["expanded"] else "nothing to expand; nothing written")


def print_quantized(console: Console, document: dict[str, Any], target: str) -> None:
    """Print what `quantize` did and how far each weight is off."""
    for row in document["quantized"]:
        console.print(
            f"quantized {row['weight']} {row['rows']} x {row['cols']}:"
            f" largest error {row['max_error']:.3g}, rms {row['rms_error']:.3g} of its block's largest value"
        )
    for row in document["left"]:
        console.print(f"left {row['weight']}: {row['reason']}")
    print_notes(console, document["notes"])
    after, before = size_text(document["output_bytes"]), size_text(document["input_bytes"])
    done = f"wrote {target}: {after} (was {before}); next: lut4tool rewrite"
    console.print(done if document["quantized"] else "nothing to quantize; nothing written")


def print_run(console: Console, document: dict[str, Any]) -> None:
    """Print a run's outputs, how they compare, which kernels served, times, and what cost most."""
    rows = []
    for row in document["outputs"]:
        figures = [f"{row[key]:.6g}" if row[key] is not None else "-" for key in ("min", "mean", "max")]
        rows.append([row["name"], row["type"], str(row["shape"]), *figures])
    print_table(console, "outputs", ("name", "type", "shape", "min", "mean", "max"), rows)
    if document["expected"]:
        _print_compared(console, document["expected"])
    served: dict[str, list[str]] = {}
    for kernel in document["kernels"]:
        served.setdefault(kernel["kernel"], []).append(kernel["node"])
    for kernel, nodes in served.items():
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        console.print(f"{nodes[0]}{more}: served by {kernel}")
    times = document["milliseconds"]
    console.print(
        f"load {document['load_milliseconds']:.1f} ms, run {times['median']:.2f} ms"
        f" (median of {times['count']}; {times['min']:.2f} to {times['max']:.2f}) on {document['device']},"
        f" peak memory {size_text(document['peak_bytes'])}"
    )
    for row in document["profile"]:
        what = f"{row['op']} {row['type']} {row['shape']}"
        console.print(
            f"{row['milliseconds']:9.3f} ms {row['count']:5d} x {what:40} {row['where']:10} {size_text(row['bytes'])}"
        )


def _print_compared(console: Console, compared: Sequence[dict[str, Any]]) -> None:
    rows = []
    for row in compared:
        figures = [f"{row[key]:.3g}" if row[key] is not None else "-" for key in ("max_abs", "max_rel", "cosine")]
        nans = f"{row['nan']} / {row['nan_expected']}"
        rows.append([row["name"], *figures, nans, "yes" if row["within"] else "no"])
    headings = ("name", "max abs", "max rel", "cosine", "NaN here / there", "within")
    print_table(console, "against the expected", headings, rows)
    for row in compared:
        if not row["within"]:
            console.print(f"{row['name']}: {row['why']}")


def print_demo(console: Console, document: dict[str, Any]) -> None:
    """Print the demonstration's figures."""
    console.print(
        f"A transformer block, {document['dim']} x {document['hidden']}, forward and adjoint:"
        f" {document['sites']} products rewritten, for which {document['witness_elements']:,} decoded weights were"
        " compared (each weight serves two products, and is compared for both)"
    )
    console.print(
        f"file {size_text(document['original_bytes'])} before, {size_text(document['rewritten_bytes'])} after;"
        f" its {document['dense_bytes'] // 4:,} weights would be {size_text(document['dense_bytes'])} as float32"
    )
    rows = []
    for row in document["rows"]:
        times = (f"{row['load_milliseconds']:.0f} ms", f"{row['run_milliseconds']:.1f} ms")
        memory = (size_text(row["peak_bytes"]), size_text(row["model_bytes"]))
        rows.append([row["model"], row["engine"], *times, *memory, f"{row['difference']:.1e}"])
    headings = ("model", "engine", "load", "one run", "peak memory", "of it for the model", "difference")
    print_table(console, "", headings, rows, names=(1,))
    served = {kernel.partition(": ")[2]: None for row in document["rows"] for kernel in row["kernels"]}
    if served:
        console.print(f"lut4tool's products of packed weights were served by {', '.join(served)}")
    for name, why in document["missing"].items():
        console.print(f"{name}: {why}")


def print_bench(console: Console, document: dict[str, Any]) -> None:
    """Print the times of each product, what they are of, and the engines that are missing."""
    machine, threads = document["machine"], document["threads"]
    where = f"{threads} thread{'s' * (threads != 1)}" if machine["device"] == "cpu" else machine["device"]
    console.print(f"{document['dtype']} on {where}; {document['bandwidth']:.0f} GB/s from memory; {document['timed']}")
    cold = any(row["cold"] for row in document["timings"])
    headings = ["engine", "best ms", "median ms", "ours / it"]
    groups: dict[str, list[list[str]]] = {}
    for row in document["timings"]:
        ratio = "" if row["ours_over_it"] is None else f"{row['ours_over_it']:.2f}"
        what = f"{row['shape']}, M {row['m']}" + (", cold" if row["cold"] else ", hot" if cold else "")
        name = f"{row['engine']} ({row['kernel']})" if row["kernel"] else row["engine"]
        groups.setdefault(what, []).append([name, f"{row['best']:.3f}", f"{row['median']:.3f}", ratio])
    for what, rows in groups.items():
        print_table(console, what, headings, rows)
    shapes = {row["shape"] for row in document["timings"]}
    said: dict[tuple[str, str], list[str]] = {}
    for missing in document["missing"]:
        said.setdefault((missing["engine"], missing["reason"]), []).append(missing["shape"])
    for (engine, reason), where_missing in said.items():
        some = "" if set(where_missing) == shapes else f" ({'; '.join(where_missing)})"
        console.print(f"{engine}: {reason}{some}")
    busy = sum(row["median"] > _BUSY * row["best"] for row in document["timings"])
    if busy:
        console.print(
            f"the machine was busy: the median is over twice the best in {busy} of {len(document['timings'])} rows;"
            " do not trust the ratios, and time again when it is quiet"
        )
    console.print(
        "ours / it: median of the ratios of runs taken in turns, under 1 where lut4tool is faster;"
        " dense: a MatMul by the decoded weight in lut4tool; floor: the packed bytes over the bandwidth"
    )


def print_selftest(console: Console, document: dict[str, Any], verbose: bool = False) -> None:
    """Print a line for each kernel and the cases that do not hold (verbose: all), and the kernels that are not here."""
    cases = document["cases"]
    kernels: dict[str, list[dict[str, Any]]] = {}
    for row in cases:
        kernels.setdefault(row["kernel"], []).append(row)
    rows = []
    for kernel, tried in kernels.items():
        wrong, largest = sum(not row["ok"] for row in tried), max(row["ratio"] for row in tried)
        rows.append([kernel, str(len(tried)), f"{largest:.3g}", f"{wrong} WRONG" if wrong else "ok"])
    print_table(console, document["machine"], ("kernel", "cases", "largest error / bound", "result"), rows)
    shown = [row for row in cases if verbose or not row["ok"]]
    rows = [[row["case"], row["kernel"], f"{row['ratio']:.3g}", "ok" if row["ok"] else "WRONG"] for row in shown]
    print_table(console, "", ("case", "kernel", "largest error / bound", "result"), rows, (0, 1))
    for name, reason in document["unavailable"].items():
        console.print(f"{name}: not on this machine ({reason})")
    wrong = sum(not row["ok"] for row in cases)
    console.print(f"{len(cases) - wrong} of {len(cases)} cases hold their bound")
