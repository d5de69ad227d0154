"""`dslide data ...`: thin commands over the library."""

import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import rich.table
import typer

from dslide import MOST_THREADS
from dslide.data import fetch as fetching
from dslide.data import format
from dslide.data.catalogue import catalogue, entry, prepared_folder
from dslide.data.convert import convert
from dslide.data.dataset import files_source_hash, folder_of, prepare_archive, state
from dslide.data.dataset import prepare as prepare_set
from dslide.data.download import page
from dslide.data.layout import Layout, Source
from dslide.data.text import Text
from dslide.errors import UserError
from dslide.files import write_atomic

if TYPE_CHECKING:
    from dslide.data.stats import Stats

app = typer.Typer(help="Data sets: list, fetch, convert, verify.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="a data set's name, see `dslide data list`")]
From = Annotated[
    Path | None,
    typer.Option("--from", help="the archive, or its files, on this machine, instead of a download"),
]


@app.command("list")
def list_() -> None:
    """Shows every set of the catalogue and what this machine has of it."""
    table = rich.table.Table(box=None, expand=True)
    table.add_column("name", no_wrap=True)
    for column in ("train", "test", "features", "labels"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)  # alone is cut on narrow terminals
    for name, row in catalogue().items():
        sizes = row.expected.sizes().values() if row.expected is not None else [None] * 4
        numbers = ("?" if size is None else f"{size:,}" for size in sizes)
        table.add_row(name, *numbers, state(row), row.title)
    # a file or a pipe isn't as narrow as a terminal
    rich.console.Console(width=None if sys.stdout.isatty() else 160).print(table)


@app.command()
def info(name: Name) -> None:
    """Shows all that is known of one set: catalogue, archive, prepared folder."""
    row = entry(name)
    lines: list[tuple[str, Any]] = [("title", row.title), ("state", state(row))]
    if row.expected is not None:
        lines += [(key, f"{value:,}") for key, value in row.expected.sizes().items()]
        averages = {
            "labels a point": row.expected.labels_per_point,
            "features a point": row.expected.nnz_per_point,
        }
        lines += [(f"published {key}", value) for key, value in averages.items() if value is not None]
    lines += [("licence", row.licence), ("citation", row.citation)]
    if row.propensity is not None:
        lines.append(("propensity", f"A {row.propensity.a}, B {row.propensity.b}"))
    if row.embedded:
        lines.append(("embedded", row.bags))
    elif row.twin is not None:
        lines += [(f"twin: {key}", value) for key, value in row.twin.model_dump().items()]
    else:
        lines += [("source", " ".join(filter(None, (page(source), source.note)))) for source in row.sources]
        lines += [("archive", row.raw), ("format", row.format)]
        lines += [("inner file", member) for member in row.members]
        if row.sha256 is not None:
            lines.append(("published sha256", row.sha256))
        present = fetching.present_archive(row)
        record = fetching.read_lock(row, present) if present is not None else None
        if record is not None:
            lines += [("present", present), *((f"archive {key}", value) for key, value in record.items())]
    lines.append(("folder", row.prepared))
    meta = format.read_meta(row.prepared) if lines[1][1] in ("prepared", "out of date") else None
    if meta is not None:
        lines.append(("hash", meta["hash"]))
        for split, sizes in meta["splits"].items():
            points = max(sizes["points"], 1)
            lines.append((f"{split}: features a point", f"{sizes['nnz'] / points:.2f}"))
            lines.append((f"{split}: labels a point", f"{sizes['label_nnz'] / points:.2f}"))
    for key, value in lines:
        typer.echo(f"{key}: {value}")


@app.command()
def fetch(name: Name, source: From = None) -> None:
    """Downloads a set's archive, or copies it from --from, and checks it; prints its path."""
    typer.echo(fetching.fetch(entry(name), source).path)


@app.command()
def prepare(name: Name, source: From = None) -> None:
    """Fetches and converts a set as far as it isn't done yet; prints the prepared folder."""
    row = entry(name)
    if source is not None and row.local:
        raise UserError(f"{name} is {'embedded' if row.embedded else 'generated'}: --from has no use")
    typer.echo(prepare_set(name) if row.local else prepare_archive(row, source))


@app.command()
def verify(name: Name) -> None:
    """Recomputes the checksums of a set (by name or folder): of its archive and of what was prepared."""
    row = catalogue().get(name)
    present = fetching.present_archive(row) if row is not None and not row.local else None
    if row is not None and present is not None:
        archive = fetching.fetch(row)
        typer.echo(f"{archive.path}: as it was recorded; sha256 {archive.sha256}")
        if not row.prepared.exists():
            return
    folder = folder_of(name)
    meta = format.verify(folder)
    if row is not None and row.expected is not None:
        format.expect(meta, row.expected.sizes())
    typer.echo(f"{folder}: all {len(meta['checksums'])} files are as they were prepared; hash {meta['hash']}")


@app.command()
def stats(
    name: Annotated[str, typer.Argument(help="a data set's name or a prepared folder")],
    plot: Annotated[Path | None, typer.Option(help="draw the figure into this .svg, .png or .pdf")] = None,
) -> None:
    """Shows how often labels occur, sizes of points, head and tail, test labels unseen in training."""
    from dslide.data.dataset import load
    from dslide.data.stats import Stats

    found = Stats.of(load(name))
    table = rich.table.Table(box=None)
    table.add_column(found.name, no_wrap=True)
    for column in ("train", "test"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found.rows():
        table.add_row(*row)
    rich.console.Console(width=None if sys.stdout.isatty() else 160).print(table)
    if plot is not None:
        _plot(found, plot)


@app.command("convert")
def convert_(
    catalogued: Annotated[
        str | None, typer.Argument(metavar="[SET]", help="a fetched set of the catalogue, instead of files")
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(help="training points in the XC format (also .gz, .bz2, .xz), or a matrix"),
    ] = None,
    test: Annotated[Path | None, typer.Option(help="test points")] = None,
    train_labels: Annotated[
        Path | None,
        typer.Option(help="labels, where --train is a matrix of the features alone (text or .npz)"),
    ] = None,
    test_labels: Annotated[Path | None, typer.Option(help="the same for --test")] = None,
    train_rows: Annotated[
        Path | None, typer.Option(help="numbers (from 1) of the training points among those of --train")
    ] = None,
    test_rows: Annotated[
        Path | None, typer.Option(help="numbers of the test points among those of --train")
    ] = None,
    column: Annotated[int, typer.Option(min=0, help="column of the files of row numbers, from 0")] = 0,
    name: Annotated[str | None, typer.Option(help="name to load the set by")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to write, instead of one for --name")] = None,
    index_base: Annotated[
        int | None,
        typer.Option(help="the first id, 0 or 1; default: 0, unless the header proves that it is 1"),
    ] = None,
    label_base: Annotated[int | None, typer.Option(help="the first label's id, where it differs")] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="the files don't begin with 'points features labels'")
    ] = False,
    features: Annotated[int | None, typer.Option(help="number of features, without a header")] = None,
    labels: Annotated[int | None, typer.Option(help="number of labels, without a header")] = None,
    label_names: Annotated[Path | None, typer.Option(help="names of the labels, one a line")] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="leave lines that aren't in the format out, and say how many")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=MOST_THREADS, help="default: all cores")] = None,
) -> None:
    """Converts a fetched set, or text files of your own, into the prepared format; prints the folder."""
    if catalogued is not None:
        if any(option is not None for option in (train, test, name, out)):
            raise UserError("a set of the catalogue has its own files and name: give SET alone, or --train")
        chosen = entry(catalogued)
        done = prepare_set(catalogued) if chosen.local else prepare_archive(chosen, download=False)
        typer.echo(done)
        return
    if train is None:
        raise UserError("say what to convert: a fetched SET of the catalogue, or --train FILE")
    if (name is None) == (out is None):
        raise UserError("say either --name NAME (to load it by name) or --out FOLDER")
    if name is not None and (not name or name.startswith(".") or "/" in name or "#" in name):
        raise UserError(f"--name {name!r}: can't be a folder's name")
    row = catalogue().get(name) if name is not None else None
    if row is not None and row.local:
        raise UserError(f"--name {name}: an embedded or generated set has this name")
    folder = prepared_folder(name) if name is not None else Path(os.fspath(out or "")).absolute()
    if folder.exists() and any(folder.iterdir()) and format.read_meta(folder) is None:
        raise UserError(f"{folder}: exists and is no prepared set; choose another folder")
    names = None
    if label_names is not None:
        try:
            names = label_names.read_text(encoding="utf8").splitlines()
        except OSError as error:
            raise UserError(f"{label_names}: {error.strerror}") from None
    layout = Layout(not no_header, index_base, label_base, features, labels, lenient)
    sources = [_source(train, train_labels, train_rows, column)]
    if test is not None and test_rows is not None:
        raise UserError("--test-rows picks points of --train; without it, --test is a file of its own")
    if test_rows is not None and train_rows is None:
        raise UserError("--test-rows needs --train-rows")
    if test is not None or test_rows is not None:
        sources.append(
            _source(test or train, train_labels if test is None else test_labels, test_rows, column)
        )
    # a name's folder is shared with other processes, --out is this person's own
    with format.locked(folder) if name is not None else nullcontext():
        convert(
            folder,
            sources[0],
            sources[1] if len(sources) > 1 else None,
            name=name or folder.name,
            source=files_source_hash(sources, layout),
            layout=layout,
            label_names=names,
            expected=None if row is None or row.expected is None else row.expected.sizes(),
            threads=threads,
        )
    typer.echo(folder)


def _source(points: Path, labels: Path | None, rows: Path | None, column: int) -> Source:
    """A split's files. UserError for a matrix of features without labels."""
    if labels is None and points.suffix == ".npz":
        raise UserError(f"{points}: a matrix of features; give the one of the labels, too (--train-labels)")
    return Source(
        Text(points), None if labels is None else Text(labels), None if rows is None else Text(rows), column
    )


def _plot(stats: "Stats", path: Path) -> None:
    """Draws the figure of a set; UserError without matplotlib or for another kind of file."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"--plot {path}: name a .svg, .png or .pdf")
    try:
        from dslide.reporting import datasets
    except ImportError:
        raise UserError("--plot: matplotlib is not installed: pip install 'dslide[harness]'") from None
    content = io.BytesIO()
    datasets.draw(stats).savefig(content, format=path.suffix[1:])
    try:
        write_atomic(path, content.getvalue())
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from None
