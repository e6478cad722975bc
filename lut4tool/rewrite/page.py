"""A rewrite's report as one page of HTML that needs no network: tables, sizes as a picture, a drawing a site."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from lut4tool.recognize.proof import Refusal
from lut4tool.rewrite import RewriteReport
from lut4tool.rewrite.drawing import after, before, svg
from lut4tool.storage import size_text

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --chain: #8884; --new: #2a9d5c; --dense: #c2571a; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 76rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td { overflow-wrap: anywhere }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .8rem; align-items: center }
.bar { background: var(--dense); height: 1rem; min-width: 2px } .bar.new { background: var(--new) }
details { margin: .4rem 0 } summary { cursor: pointer }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; overflow-x: auto }
figure { margin: .5rem 0 } figcaption { font-size: .85rem; opacity: .8 }
svg { max-width: none } svg text { font: 11px ui-monospace, monospace; text-anchor: middle; fill: currentColor }
svg rect { fill: var(--soft); stroke: var(--line) } svg .arrow { fill: none; stroke: currentColor; opacity: .45 }
svg .constant rect { fill: none } svg .chain rect { fill: var(--chain) }
svg .product rect { stroke: var(--dense); stroke-width: 2 } svg .packed rect { stroke: var(--new); stroke-width: 2 }
"""


def page(report: RewriteReport, title: str) -> str:
    """A self-contained page: what was rewritten and refused, bytes before and after, the graph around each site."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_sentence(report)}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        "<h2>Sizes</h2>",
        _bars(report),
        "<h2>Rewritten</h2>",
        _table(("node", "operator", "rows × cols", "block", "weight type", "bytes", "checked"), _rows(report)),
        "<h2>Refused</h2>",
        _refusals(report.refused),
        *_sites(report),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _sentence(report: RewriteReport) -> str:
    sites, refused = len(report.rewritten), len(report.refused)
    return f"{sites} product{'s' * (sites != 1)} rewritten, {refused} refused."


def _bars(report: RewriteReport) -> str:
    """Four bars: the model file and the weights, before and after, drawn to one scale."""
    bars = [
        ("model file before", report.input_bytes, ""),
        ("model file after", report.output_bytes, "new"),
        ("weights, once a runtime decodes them", report.dense_bytes, ""),
        ("weights, packed", report.packed_bytes, "new"),
    ]
    largest = max(1, *(size for _, size, _ in bars))
    cells = (
        f'<span>{label}</span><div><div class="bar {kind}" style="width:{100 * size / largest:.2f}%"></div></div>'
        f"<span>{size_text(size)}</span>"
        for label, size, kind in bars
    )
    return f'<div class="bars" role="img" aria-label="sizes">{"".join(cells)}</div>'


def _rows(report: RewriteReport) -> Iterable[tuple[str, ...]]:
    for proof, witness in report.rewritten:
        facts = proof.to_json()
        checked = "-" if witness is None else "all elements" if witness.all else f"{witness.compared:,} elements"
        size = f"{proof.rows} × {proof.cols}"
        yield facts["node"], proof.op, size, str(proof.block_size), proof.weight_dtype, facts["bytes"], checked


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>" if body else "<p>None.</p>"


def _refusals(refused: Iterable[Refusal]) -> str:
    return _table(("node", "why", "where"), ((refusal.node, refusal.reason, refusal.at) for refusal in refused))


def _sites(report: RewriteReport) -> Iterable[str]:
    """A folded pair of drawings a site; the first is open."""
    if report.surroundings:
        yield "<h2>The graph around each site</h2>"
        yield "<p>Before: the chain in grey, its product in orange. After: what takes their place, in green.</p>"
    for index, ((proof, _), around) in enumerate(zip(report.rewritten, report.surroundings, strict=True)):
        figures = "".join(
            f"<figure><figcaption>{when}</figcaption>{svg(drawing)}</figure>"
            for when, drawing in (("before", before(proof, around)), ("after", after(proof, around)))
        )
        opened = " open" if index == 0 else ""
        name = escape(proof.site.name)
        yield f'<details{opened}><summary>{name}</summary><div class="pair">{figures}</div></details>'
