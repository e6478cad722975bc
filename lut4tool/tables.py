"""What commands print of their documents: tables and lines on a rich console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from lut4tool.storage import size_text


def sizes(document: dict[str, Any]) -> str:
    """The sizes of a rewrite in one line."""
    after, before = size_text(document["output_bytes"]), size_text(document["input_bytes"])
    packed, dense = size_text(document["packed_bytes"]), size_text(document["dense_bytes"])
    return f"{after} (was {before}); weights {packed} packed, {dense} if decoded"


def print_sites(console: Console, document: dict[str, Any], key: str) -> None:
    """Print the table of proved sites and the sentence of each refusal."""
    if document[key]:
        table = Table(title=f"{len(document[key])} {key}", title_justify="left")
        headings = ["node", "operator", "rows x cols", "block", "weight type", "bytes"]
        headings += ["checked"] if key == "rewritten" else ["chain", "packed", "decoded", "onnxruntime"]
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for site in document[key]:
            row = [site["node"], site["op"], f"{site['rows']} x {site['cols']}"]
            row += [str(site["block_size"]), site["weight_dtype"], site["bytes"]]
            table.add_row(*row, *(_checked(site) if key == "rewritten" else _costs(site)))
        console.print(table)
    for refusal in document["refused"]:
        console.print(f"refused: {refusal['node']}: {refusal['reason']}")


def _checked(site: dict[str, Any]) -> list[str]:
    """How the witness of a rewritten site looked."""
    witness = site["witness"]
    return ["all elements" if witness["all"] else f"{witness['compared']:,} elements"]


def _costs(site: dict[str, Any]) -> list[str]:
    """The chain of a found site, and its weight's bytes: packed, decoded, and while onnxruntime loads it."""
    folded = site["onnxruntime_bytes"]
    theirs = "not folded" if folded is None else size_text(folded)
    return [site["chain"], size_text(site["packed_bytes"]), size_text(site["dense_bytes"]), theirs]


def print_run(console: Console, document: dict[str, Any]) -> None:
    """Print a run's outputs, how they compare, which kernels served, times, and what cost most."""
    table = Table(title="outputs", title_justify="left")
    for heading in ("name", "type", "shape", "min", "mean", "max"):
        table.add_column(heading, overflow="fold")
    for row in document["outputs"]:
        figures = [f"{row[key]:.6g}" if row[key] is not None else "-" for key in ("min", "mean", "max")]
        table.add_row(row["name"], row["type"], str(row["shape"]), *figures)
    console.print(table)
    if document["expected"]:
        table = Table(title="against the expected", title_justify="left")
        for heading in ("name", "max abs", "max rel", "cosine", "NaN here / there", "within"):
            table.add_column(heading, overflow="fold")
        for row in document["expected"]:
            nans = f"{row['nan']} / {row['nan_expected']}"
            figures = [f"{row[key]:.3g}" if row[key] is not None else "-" for key in ("max_abs", "max_rel", "cosine")]
            table.add_row(row["name"], *figures, nans, "yes" if row["within"] else f"no: {row['why']}")
        console.print(table)
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
