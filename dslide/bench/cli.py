"""`dslide bench`: micro-benchmarks that print their machine."""

import json
import os
import platform
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dslide import _core
from dslide.bench import micro
from dslide.bench.machine import cpu
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
        typer.Argument(help=f"which: {', '.join(micro.BENCHES)}; all by default", show_default=False),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", help="threads; 0: all cores that this process may use")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Runs the named benchmarks; medians, with the range beside them."""
    unknown = sorted(set(names or ()) - set(micro.BENCHES))
    if unknown:
        raise UserError(f"no benchmark named '{unknown[0]}'; choose from: {', '.join(micro.BENCHES)}")
    threads = threads or len(os.sched_getaffinity(0))
    machine = {
        "cpu": cpu()["model"],
        "instruction_set": _core.instruction_set(),
        "compiler": _core.compiler,
        "threads": threads,
        "kernel": platform.release(),
    }
    console = Console(stderr=True)
    rows = []
    for name in names or list(micro.BENCHES):
        console.print(f"bench {name} ...")
        rows += micro.BENCHES[name](threads)
    if as_json:
        typer.echo(json.dumps({"machine": machine, "rows": [row.as_dict() for row in rows]}))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    table = Table()
    for heading in ("bench", "case", "median", "range", "unit"):
        table.add_column(heading, justify="right" if heading in ("median", "range") else "left")
    for row in rows:
        table.add_row(row.bench, row.case, f"{row.value:,.4g}", f"{row.low:,.4g} - {row.high:,.4g}", row.unit)
    console.print(table)
