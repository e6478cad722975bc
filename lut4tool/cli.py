"""The command line: each command calls one library function and prints what it returns."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lut4tool import __version__
from lut4tool.errors import Lut4Error
from lut4tool.options import (
    Device,
    DeviceOption,
    ExternalOption,
    Float,
    Half,
    JsonOption,
    ModelArgument,
    VendorOption,
    numbers,
    usage,
)

if TYPE_CHECKING:
    import onnx
    from rich.console import Console

    from lut4tool.rewrite import RewriteReport

USAGE = 2
NOTHING_TO_REWRITE = 3
DIFFERS = 4
INTERRUPTED = 130

#: What typer raises for a command line that it does not take, whichever click it brings.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

#: Of every rich console: names of models and files are printed as they are, `[b]` and `:x:` included.
_NO_TERMINAL = 1 << 16  # cells
_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}

app = typer.Typer(
    name="lut4tool",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prove, rewrite and run ONNX models whose 4-bit weights are decoded through a lookup table.",
)


def main() -> None:
    """Run the command line; exit 0 done, 1 error, 2 usage, 3 nothing to rewrite, 4 outputs or a witness differ.

    With --json an error is a document on stdout too: {"error": {"kind", "message", "exit"}}.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that has no ☃ shows \u2603
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except Lut4Error as error:
        _fail(error, str(error), 1)
    except OSError as error:
        text = str(error.strerror or error)
        what = error.filename or "a file, or what this is printed to"
        _fail(error, f"{what}: {text[:1].lower()}{text[1:]}", 1)
    except MemoryError as error:
        _fail(error, "there is not enough memory for this", 1)
    except SystemExit as done:  # what typer makes of all that it knows
        if interrupt := _behind(done, KeyboardInterrupt):
            _fail(interrupt, "; ".join(["interrupted", *getattr(interrupt, "__notes__", [])]), INTERRUPTED)
        if (usage := _behind(done, _USAGE_ERROR)) and _asked_for_json():
            _print_error(usage, usage.format_message(), USAGE)
        raise
    except Exception as error:
        if os.environ.get("LUT4TOOL_TRACEBACK"):
            raise
        what = f"internal error, {type(error).__name__}: {error} (LUT4TOOL_TRACEBACK=1 shows where)"
        _fail(error, what, 1)


def _behind(error: BaseException, kind: Any) -> Any:
    """The error of a kind that another came from; None where there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause


def _fail(error: BaseException, message: str, status: int) -> None:
    """Say what went wrong, and exit."""
    _say(message)
    if _asked_for_json():
        _print_error(error, message, status)
    sys.exit(status)


def _asked_for_json() -> bool:
    return "--json" in sys.argv[1:]


def _print_error(error: BaseException, message: str, status: int) -> None:
    said = {"kind": type(error).__name__, "message": " ".join(message.split()), "exit": status}
    with suppress(OSError):  # where nothing can be printed, which may be the error
        _print_json({"error": said})


def _say(message: str) -> None:
    """One line on stderr."""
    line = " ".join(message.split())
    printable = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)  # of names, for a terminal
    print("lut4tool: " + printable, file=sys.stderr)


def _say_differing(report: RewriteReport) -> None:
    """One line a site whose proof was wrong: nothing was rewritten, and we are to hear of it."""
    for refusal in report.differing:
        _say(f"WITNESS DIFFERS: {refusal.node}: {refusal.reason}: nothing is rewritten; please report it to lut4tool")


def _console() -> Console:
    """Where tables and sentences go: stdout, as wide as its terminal, and as wide as it takes where it is none."""
    from rich.console import Console

    wide = None if sys.stdout is not None and sys.stdout.isatty() else _NO_TERMINAL
    return Console(width=wide, soft_wrap=True, **_PLAIN)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield `report(what, done, total)` that draws a bar on stderr, or None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value, with null for the NaN and infinities that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(count: int) -> str:
    from lut4tool.storage import size_text

    return size_text(count)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version where it is asked for."""
    if show:
        print(f"lut4tool {__version__}")
        raise typer.Exit


@app.command(epilog="Example: lut4tool rewrite model.onnx small.onnx --verify --report report.html")
def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The ONNX file to rewrite.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Where to write; IN itself is allowed.", show_default=False)
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every block with the original chain.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prove and check, but write nothing.")] = False,
    vendor: VendorOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a .json or .html report.")
    ] = None,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """Replace each proved 4-bit decode chain with one node that keeps the weight packed."""
    from lut4tool import tables
    from lut4tool.rewrite import rewrite as rewrite_file

    if report is not None and report.suffix not in (".json", ".html"):
        raise typer.BadParameter("the report's name ends in .json or .html", param_hint="--report")
    if report is not None and os.path.realpath(report) in map(os.path.realpath, (source, target)):
        raise typer.BadParameter("the report would replace the model", param_hint="--report")
    if report is not None and not report.parent.is_dir():
        raise typer.BadParameter(f"the folder {report.parent} does not exist", param_hint="--report")
    with _progress() as progress:
        result = rewrite_file(
            source,
            target,
            verify=verify,
            dry_run=dry_run,
            vendor=vendor,
            force=force,
            allow_external=tuple(allow_external or ()),
            drawn=report is not None and report.suffix == ".html",
            progress=progress,
        )
    document = result.to_json()
    if report is not None:
        what = "dry run of a rewrite" if dry_run else "rewrite"
        if not document["rewritten"]:
            what = "nothing rewritten"
        _write_report(report, result, f"{what}: {source.name} to {target.name}, by lut4tool {__version__}")
    if json_output:
        _print_json(document)
    else:
        console = _console()
        tables.print_sites(console, document, "rewritten")
        tables.print_notes(console, result.notes)
        if document["rewritten"]:
            verb = "would write" if dry_run else "wrote"
            console.print(f"{verb} {target}: {result.sizes}")
        else:
            console.print("nothing written" if result.differing else "nothing to rewrite; nothing written")
        if report is not None:
            console.print(f"the report is {report}")
    _say_differing(result)
    if result.differing:
        raise typer.Exit(DIFFERS)
    if not document["rewritten"]:
        raise typer.Exit(NOTHING_TO_REWRITE)


def _write_report(path: Path, report: RewriteReport, title: str) -> None:
    """Write the report atomically, as JSON or as one self-contained page."""
    from lut4tool.rewrite.page import page
    from lut4tool.storage import write_atomic

    text = json.dumps(report.to_json(), indent=2) if path.suffix == ".json" else page(report, title)
    write_atomic(path, text.encode(errors="backslashreplace"))


@app.command(epilog="Example: lut4tool expand small.onnx standard.onnx")
def expand(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A rewritten ONNX file.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Where to write; IN itself is allowed.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """The way back: replace each node of ai.lut4tool with the standard operators that decode its weight.

    The decoded weights are the same bit for bit. Packed data is neither read nor copied within a folder.

    Exit status 3, and nothing written, where there is no such node.
    """
    from lut4tool import tables
    from lut4tool.rewrite.expand import expand as expand_file

    with _progress() as progress:
        result = expand_file(source, target, force=force, allow_external=tuple(allow_external or ()), progress=progress)
    document = result.to_json()
    if json_output:
        _print_json(document)
    else:
        tables.print_expanded(_console(), document, str(target))
    if not document["expanded"]:
        raise typer.Exit(NOTHING_TO_REWRITE)


@app.command(epilog="Example: lut4tool inspect model.onnx")
def inspect(
    model: ModelArgument,
    vendor: VendorOption = False,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """Say which chains are found, which are refused and why, and what the weights cost packed and dense.

    Exit status 1 where a file that holds weights of the model cannot be read: what is said is of the model alone then.
    """
    from lut4tool import tables
    from lut4tool.recognize.summary import summarize
    from lut4tool.storage import Tensors, read_model

    proto = read_model(model)
    summary = summarize(proto, model.stat().st_size, Tensors(model.parent, tuple(allow_external or ())), vendor)
    document = {**summary.to_json(), "unsupported": _unsupported(proto)}
    if json_output:
        _print_json(document)
    else:
        tables.print_summary(_console(), document)
    for missing in document["unreadable"]:
        _say(
            f"{missing['reason']} ({missing['tensors']} tensor{'s' * (missing['tensors'] != 1)} of it,"
            f" {_size(missing['bytes'])}); a chain that cannot be proved without this file counts as refused"
        )
    if document["unreadable"]:
        raise typer.Exit(1)


def _unsupported(model: onnx.ModelProto) -> list[str] | None:
    """What keeps a model from running, in sentences; None where MLX does not load."""
    try:
        from lut4tool.runtime import backend  # it says in an error where MLX is missing
    except Lut4Error:
        return None
    from lut4tool.runtime.planning import check

    return check(model, backend.device("cpu"))


@app.command(epilog="Example: lut4tool run small.onnx --inputs x.npz --outputs y.npz")
def run(
    model: ModelArgument,
    inputs: Annotated[Path | None, typer.Option("--inputs", metavar="X.npz", help="Inputs by name.")] = None,
    one: Annotated[
        list[str] | None,
        typer.Option("-i", metavar="NAME=VALUE", help="One input: a file X.npy, a number or a JSON list; repeatable."),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Draw the inputs that are not given.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --random.")] = 0,
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="Size of a symbolic dimension; else 1.")
    ] = None,
    rewrite_first: Annotated[bool, typer.Option("--rewrite", help="Rewrite the chains in memory first.")] = False,
    outputs: Annotated[Path | None, typer.Option("--outputs", metavar="Y.npz", help="Write the outputs.")] = None,
    expected: Annotated[Path | None, typer.Option("--expected", metavar="Y.npz", help="Compare the outputs.")] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Of the largest expected magnitude of an output.")] = 1e-5,
    atol: Annotated[float, typer.Option(min=0, help="Added to --rtol's bound.")] = 1e-6,
    device: DeviceOption = Device.AUTO,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before them.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="T.json", help="Write a Chrome trace of the last run.")
    ] = None,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """Run a model with MLX and print its outputs, times and the kernels that served."""
    import time

    from lut4tool import tables
    from lut4tool.recognize import recognize
    from lut4tool.runtime.running import parse_dims, parse_literal, run_model
    from lut4tool.runtime.session import Runtime
    from lut4tool.storage import Tensors, read_model

    if dim and not random:
        raise typer.BadParameter("it sizes the inputs that --random draws", param_hint="--dim")
    if bare := [text for text in one or () if "=" not in text]:
        raise typer.BadParameter(f"write NAME={bare[0]}", param_hint="-i")
    with usage("-i"):
        for text in one or ():
            if not text.endswith(".npy"):
                parse_literal(text)
    with usage("--dim"):
        parse_dims(dim or ())
    if outputs is not None and outputs.suffix != ".npz":
        raise typer.BadParameter("the outputs' file name ends in .npz", param_hint="--outputs")
    if profile is not None and profile.suffix != ".json":
        raise typer.BadParameter("the trace's file name ends in .json", param_hint="--profile")
    given = (model, inputs, expected, *(text.partition("=")[2] for text in one or ()))
    read = {os.path.realpath(path) for path in given if path is not None}
    for target, option in ((outputs, "--outputs"), (profile, "--profile")):
        if target is not None and os.path.realpath(target) in read:
            raise typer.BadParameter(f"{target} is read by this run, and would be replaced", param_hint=option)
    start = time.perf_counter()
    proto = read_model(model)
    tensors = Tensors(model.parent, tuple(allow_external or ()))
    differing = False
    if rewrite_first:
        from lut4tool.rewrite import rewrite_model

        with _progress() as progress:
            rewritten = rewrite_model(proto, tensors, progress=progress)
        for line in tables.refusals([refusal.to_json() for refusal in rewritten.refused]):
            _say(f"note: {line}")
        _say_differing(rewritten)
        differing = bool(rewritten.differing)
        if not rewritten.rewritten and not rewritten.refused:
            _say("note: nothing to rewrite: no 4-bit decode chain found")
    left = 0 if rewrite_first else len(recognize(proto).proofs)
    runtime = Runtime(proto, device, tensors)
    result = run_model(
        runtime,
        load_milliseconds=(time.perf_counter() - start) * 1000,
        given=(*([str(inputs)] if inputs else ()), *(one or ())),
        random_seed=seed if random else None,
        dims=tuple(dim or ()),
        repeat=repeat,
        warmup=warmup,
        profile=profile,
        save=outputs,
        expected=expected,
        rtol=rtol,
        atol=atol,
    )
    document = result.to_json()
    if json_output:
        _print_json(document)
    else:
        tables.print_run(_console(), document)
        for path in filter(None, (outputs, profile)):
            _console().print(f"wrote {path}")
    if left:
        _say(
            f"note: {left} product{'s' if left > 1 else ''} of this model decode{'s' if left == 1 else ''} 4-bit"
            f" weights to dense ones at each run; `lut4tool rewrite {model} OUT` or `run --rewrite` keeps them packed"
        )
    if differing or any(not row["within"] for row in document["expected"]):
        raise typer.Exit(DIFFERS)


@app.command(epilog="Example: lut4tool quantize float.onnx model.onnx --rounding float16")
def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A float ONNX file.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write.", show_default=False)],
    codebook: Annotated[str, typer.Option(metavar="nf4|fp4|FILE", help="The table, or a file of 16 numbers.")] = "nf4",
    block_size: Annotated[int, typer.Option(help="Elements that share a scale: even, at least 2.")] = 64,
    rounding: Annotated[Half | None, typer.Option(help="Round each decoded weight.")] = None,
    match: Annotated[str | None, typer.Option(metavar="REGEX", help="Only weights whose name this finds.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """Spell MatMul and Gemm weights of a float model as the standard 4-bit decode chain."""
    from lut4tool import tables
    from lut4tool.encode import check_codebook
    from lut4tool.produce import check_options, quantize_file

    with usage("--codebook"):
        check_codebook(codebook)
    with usage("--block-size"):
        check_options(block_size)
    with usage("--match"):
        check_options(match=match)
    with _progress() as progress:
        result = quantize_file(
            source,
            target,
            codebook=codebook,
            block_size=block_size,
            rounding=rounding,
            match=match,
            force=force,
            allow_external=tuple(allow_external or ()),
            progress=progress,
        )
    document = result.to_json()
    if json_output:
        _print_json(document)
    else:
        tables.print_quantized(_console(), document, str(target))
    if not document["quantized"]:
        raise typer.Exit(NOTHING_TO_REWRITE)


@app.command(epilog="Example: lut4tool ops --json")
def ops(json_output: JsonOption = False) -> None:
    """List the operators that `run` serves: versions, the types of their inputs, and what is refused."""
    from lut4tool.runtime.operators import document

    listed = document()
    if json_output:
        _print_json(listed)
        return
    for row in listed["operators"]:
        until = "newest" if row["until"] is None else row["until"]
        print(f"{row['domain']}::{row['op']} {row['since']} to {until}" + (" on the host" if row["host"] else ""))
        for name, kinds in row["types"].items():
            print(f"    {name}: {kinds}")
        if row["refused"]:
            print(f"    {row['refused']}")
    for row in listed["refused"]:
        print(f"{row['domain']}::{row['op']} is refused: {row['reason']}")


@app.command(epilog="Example: lut4tool demo --dir models")
def demo(
    directory: Annotated[Path | None, typer.Option("--dir", metavar="D", help="Keep the models here.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Build a small transformer block with NF4 chains, rewrite it and run both, side by side."""
    import tempfile

    from lut4tool import tables
    from lut4tool.demo import demo as run_demo

    with tempfile.TemporaryDirectory() as scratch, _progress() as progress:
        result = run_demo(directory or Path(scratch), progress=progress)
    if json_output:
        _print_json(result.to_json())
    else:
        tables.print_demo(_console(), result.to_json())


@app.command(epilog="Example: lut4tool bench --shape 14336,4096 --m 1,16")
def bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="An ONNX file with 4-bit products.", show_default=False)
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,K[,BLOCK]",
            help="In place of MODEL: N outputs, depth K, blocks of 64 or BLOCK; repeatable."
            " The word standard is four shapes of large models.",
            show_default=False,
        ),
    ] = None,
    m: Annotated[
        str,
        typer.Option("--m", metavar="M,M,...", help="Rows of x. The word standard is 1,16,128,256,512."),
    ] = "1,16,128",
    dtype: Annotated[Float, typer.Option(help="Of x and y.")] = Float.FLOAT32,
    device: DeviceOption = Device.AUTO,
    seconds: Annotated[float, typer.Option(min=0, help="For each shape and number of rows.")] = 2.0,
    cold: Annotated[bool, typer.Option("--cold", help="Also with weights that no cache holds.")] = False,
    allow_external: ExternalOption = None,
    json_output: JsonOption = False,
) -> None:
    """Time this machine's kernels beside dense products, and onnxruntime's and bitsandbytes' where installed.

    Give a MODEL, whose 4-bit products are timed, or --shape.

    All of them take turns, so that a busy machine slows them alike; where it was so busy that ratios say little, that
    is said.
    """
    from lut4tool import tables
    from lut4tool.bench import STANDARD, STANDARD_ROWS, Shape, shapes_of
    from lut4tool.bench import bench as run_bench
    from lut4tool.storage import Tensors, read_model

    rows = list(STANDARD_ROWS) if m == "standard" else numbers(m, "--m")
    shapes = []
    for text in shape or ():
        if text == "standard":
            shapes += [Shape(*sizes) for sizes in STANDARD]
            continue
        n, k, *block = numbers(text, "--shape", (2, 3))
        if block and block[0] % 2:
            raise typer.BadParameter(f"a block has an even number of elements, not {block[0]}", param_hint="--shape")
        shapes.append(Shape(n, k, block[0] if block else 64))
    if (model is None) == (not shapes):
        raise typer.BadParameter("give a MODEL, or --shape N,K" + " and not both" * bool(shapes))
    if model is not None:
        shapes = shapes_of(read_model(model), Tensors(model.parent, tuple(allow_external or ())))
    with _progress() as progress:
        result = run_bench(shapes, rows, device, seconds, cold, progress, dtype)
    if json_output:
        _print_json(result.to_json())
    else:
        tables.print_bench(_console(), result.to_json())


@app.command(epilog="Example: lut4tool selftest --device cpu")
def selftest(
    device: DeviceOption = Device.AUTO,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every case, not a line for each kernel.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Check every kernel of this machine against float64 on the host; exit 4 where one is out of its bound."""
    from lut4tool import tables
    from lut4tool.runtime import backend  # first: it readies MLX for everything that imports it

    from lut4tool.kernels.selftest import selftest as run_selftest  # isort: skip

    chosen = backend.device(device)
    with _progress() as progress:
        result = run_selftest(chosen, backend.kind(chosen), progress=progress)
    document = result.to_json()
    if json_output:
        _print_json(document)
    else:
        tables.print_selftest(_console(), document, verbose)
    if not all(row["ok"] for row in document["cases"]):
        raise typer.Exit(DIFFERS)


if __name__ == "__main__":
    main()
