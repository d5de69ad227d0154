"""`dslide bench`: micro-benchmarks that print their machine."""

import dataclasses
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dslide import MOST_THREADS, _core
from dslide.bench.machine import cpu
from dslide.bench.speed import BENCHES
from dslide.bench.speed.bounds import FORMULA
from dslide.bench.speed.exchange import LINKS
from dslide.bench.speed.measure import Row
from dslide.bench.speed.scaling import AXES, PROJECTION
from dslide.bench.speed.sizes import AMAZON, QUICK, Size, generated
from dslide.bench.speed.training import SETTINGS
from dslide.config import parse_sets
from dslide.data import Dataset, load
from dslide.errors import UserError

app = typer.Typer(
    help="Micro-benchmarks of the core; they print the machine that they ran on.",
    invoke_without_command=True,
    context_settings={"allow_interspersed_args": True},  # options may follow the names
)


@app.callback()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"which: {', '.join(BENCHES)}; all by default", show_default=False),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            "--threads", help="threads; 0: all cores that this process may use", min=0, max=MOST_THREADS
        ),
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes: does it run, not how fast")] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", help="a prepared data set instead of points of Amazon-670K's shape"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", help="batch size, may be repeated", min=1)
    ] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", help="hidden units", min=16)] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help=f"a part of scaling ({', '.join(AXES)}), train-step ({', '.join(SETTINGS)}) "
            f"or exchange ({', '.join(LINKS)})",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value of every training setting")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="inference: of this trained run, exact and approximate, on --data"),
    ] = None,
    rivals: Annotated[
        bool,
        typer.Option("--rivals/--no-rivals", help="TensorFlow and napkinXC beside, where they are installed"),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Runs the named benchmarks: medians, ranges, bounds from the machine's own rates, a rival's ratio.

    Bounds are explained in docs/performance.md.
    """
    unknown = sorted(set(names or ()) - set(BENCHES))
    if unknown:
        raise UserError(f"no benchmark named '{unknown[0]}'; choose from: {', '.join(BENCHES)}")
    if model is not None and (data is None or "inference" not in (names or BENCHES)):
        raise UserError("--model is for `dslide bench inference --data NAME`: a run, and points to ask it")
    parts = (*AXES, *SETTINGS, *LINKS)
    foreign = sorted(set(only or ()) - {*parts})
    if foreign:
        raise UserError(f"--only {foreign[0]}: choose from {', '.join(parts)}")
    threads = threads or len(os.sched_getaffinity(0))
    size, dataset = _what(quick, data, batch, hidden)
    machine = {
        "cpu": cpu()["model"],
        "instruction_set": _core.instruction_set(),
        "compiler": _core.compiler,
        "threads": threads,
        "kernel": platform.release(),
        "data": dataset.name,
    }
    console, rows, changed = Console(stderr=True), list[Row](), parse_sets(sets or [])
    if changed.get("network", {}).get("hidden_layers"):
        raise UserError("--set network.hidden_layers: the bounds are those of one hidden layer; leave it out")
    if kernel := os.environ.get("OPENBLAS_CORETYPE"):  # numpy is loaded: too late to unset it here
        console.print(
            f"OPENBLAS_CORETYPE={kernel} binds numpy's products to that kernel: unset it for a fair rival"
        )
    for name in names or list(BENCHES):
        console.print(f"bench {name} ...")
        rows += BENCHES[name](
            size,
            threads,
            dataset=dataset,
            source=data,
            sets=changed,
            model=model,
            only=tuple(only or parts),
            rivals=rivals,
        )
    if as_json:
        report = {
            "machine": machine,
            "size": dataclasses.asdict(size),
            "bound": FORMULA,
            "projection": PROJECTION,
        }
        typer.echo(json.dumps(report | {"rows": [row.as_dict() for row in rows]}))
    else:
        _show(machine, rows)


def _what(quick: bool, data: str | None, batch: list[int] | None, hidden: int | None) -> tuple[Size, Dataset]:
    size = QUICK if quick else AMAZON
    changed: dict[str, Any] = {}
    if batch:
        changed["batches"] = tuple(batch)
    if hidden:
        changed["hidden"] = hidden
    if data is not None:
        dataset = load(data)
        changed |= {"features": dataset.num_features, "labels": dataset.num_labels}
        changed |= {"points": len(dataset.train)}
        return dataclasses.replace(size, **changed), dataset
    size = dataclasses.replace(size, **changed)
    return size, generated(size)


def _show(machine: dict[str, Any], rows: list[Row]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if any(row.bound and row.gbytes for row in rows):
        console.print(FORMULA)
    if any("projected" in row.case for row in rows):
        console.print(PROJECTION)
    table = Table()
    for heading in (
        "bench",
        "case",
        "median",
        "range",
        "unit",
        "bound",
        "of it",
        "GB/s",
        "GFLOP/s",
        "rival",
        "note",
    ):
        table.add_column(heading, justify="left" if heading in ("bench", "case", "unit", "note") else "right")
    for row in rows:
        rival = f"{row.ratio:.2f} x {row.rival_name} ({row.rival:,.4g})" if row.ratio else ""
        table.add_row(
            row.bench,
            row.case,
            _number(row.value),
            f"{_number(row.low)} - {_number(row.high)}",
            row.unit,
            _number(row.bound),
            f"{100 * row.of_bound:.0f} %" if row.of_bound else "",
            _number(row.gbytes),
            _number(row.gflops),
            rival,
            row.note or "",
        )
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
