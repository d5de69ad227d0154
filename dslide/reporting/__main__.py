"""Command line of the reports: `python -m dslide.reporting figure|table|page ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dslide.errors import UserError
from dslide.reporting import output, page
from dslide.reporting.race import Race

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Tables, figures and the page, from records alone.",
)

Name = Annotated[str, typer.Argument(help="A file of reports/, without .py.")]
Experiment = Annotated[Path, typer.Option(help="The experiment's YAML file.")]
Results = Annotated[Path, typer.Option(help="The experiment's records: results/<experiment>.")]
Out = Annotated[Path, typer.Option(help="The file to write; its siblings get the same name.")]


@app.command()
def figure(name: Name, experiment: Experiment, results: Results, out: Out) -> None:
    """Writes OUT (.svg) with a .png and a .json that names inputs, revision and command."""
    output.write_figure(
        name, Race.load(experiment, results), out, ["python", "-m", "dslide.reporting", *sys.argv[1:]]
    )


@app.command()
def table(name: Name, experiment: Experiment, results: Results, out: Out) -> None:
    """Writes OUT (.csv) with an .html beside it."""
    output.write_table(name, Race.load(experiment, results), out)


@app.command(name="page")
def write_page(
    experiment: Experiment,
    results: Results,
    out: Out,
    command: Annotated[str, typer.Option(help="The command that made the records, for the page.")] = "make",
) -> None:
    """Writes OUT (.html), one file with everything in it; takes the figures that lie beside it."""
    page.write_page(Race.load(experiment, results), out, command)


@app.command(name="list")
def list_names() -> None:
    """Prints the report files: name, figure and/or table, title."""
    for name in output.names():
        module = output.load(name)
        kinds = "+".join(kind for kind in ("figure", "table") if hasattr(module, kind))
        typer.echo(f"{name}\t{kinds}\t{module.TITLE}")


def main() -> int:
    """Runs the command line; a UserError becomes one line and exit status 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
