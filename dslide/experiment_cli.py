"""`dslide race spec|list|data|schema`: what the workflow asks about an experiment file, for people too."""

from pathlib import Path
from typing import Annotated

import typer

from dslide.errors import UserError
from dslide.files import write_atomic

File = Annotated[Path, typer.Argument(help="An experiment's YAML file.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the `dslide race` group."""
    app.command()(spec)
    app.command(name="list")(list_runs)
    app.command()(data)
    app.command()(schema)


def spec(
    experiment: File,
    run_id: Annotated[str, typer.Argument(help="For example runs/dslide/one/seed-0.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; without it, standard output.")] = None,
    granted: Annotated[
        int | None, typer.Option(help="Cores that it may have; refused if it needs others.")
    ] = None,
) -> None:
    """Print the complete instruction of one run, which `dslide race run` takes."""
    from dslide.experiment import RunId, load_experiment, run_spec

    whole = load_experiment(experiment)
    found = run_spec(whole, RunId.parse(run_id))
    needed = found.cluster.cores * (found.cluster.nodes if found.cluster.kind == "virtual" else 1)
    if granted is not None and granted != needed:
        raise UserError(
            f"{run_id} needs {needed} cores and was granted {granted}: give Snakemake --cores {needed}, "
            f"or ask for fewer in {experiment}, key clusters.{RunId.parse(run_id).cluster}"
        )
    if out is None:
        print(found.dump(), end="")
    else:
        write_atomic(out, found.dump())


def list_runs(experiment: File) -> None:
    """Print the ids of an experiment's runs, one a line."""
    from dslide.experiment import load_experiment, run_ids

    for run_id in run_ids(load_experiment(experiment)):
        print(run_id)


def data(experiment: File) -> None:
    """Prepare an experiment's data set: download, convert, slice, whatever is missing. Prints the folder."""
    from dslide.experiment import load_experiment
    from dslide.experiment_data import prepare_data

    print(prepare_data(load_experiment(experiment)))


def schema() -> None:
    """Print the JSON schema of experiment files, which config/schema.json is."""
    from dslide.experiment import schema as text

    print(text(), end="")
