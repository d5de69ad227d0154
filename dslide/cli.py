"""The command line: arguments in, library calls, exit statuses out.

0 done; 2 usage, bad input or config; 1 any other failure; 130 Ctrl-C. Data go to stdout, everything else to
stderr.
"""

import errno
import importlib
import json
import logging
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dslide import MOST_THREADS, __version__
from dslide.errors import UserError

if TYPE_CHECKING:
    from dslide.comm import LocalComm
    from dslide.data import Dataset

app = typer.Typer(
    help="Trains huge sparse networks on a few cheap CPUs with a slow network, and races it against others.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Data = Annotated[str | None, typer.Option("--data", help="A data set's name or a prepared folder.")]
TrainFile = Annotated[Path | None, typer.Option("--train", help="Training points in the XC format.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key.sub=value, may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object at the end on stdout.")]
Threads = Annotated[
    int,
    typer.Option("--threads", help="Threads a rank; 0: all cores that it may use.", min=0, max=MOST_THREADS),
]


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="The run's folder: records, checkpoints, model.")],
    data: Data = None,
    train_file: TrainFile = None,
    test_file: Annotated[Path | None, typer.Option("--test", help="Test points in the XC format.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="default; accurate; slide: the papers' algorithm.")
    ] = None,
    sets: Sets = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the training points.")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads a rank; 0: all its cores.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of every random draw.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Train a network; alone, or as one of several ranks under mpiexec."""
    from dslide import comm as comms
    from dslide.config import build_config, merge, parse_sets

    comm = comms.world()
    options = {"epochs": epochs, "threads": threads, "seed": seed}
    overrides = merge(
        parse_sets(sets or []), {key: value for key, value in options.items() if value is not None}
    )
    settings = build_config(preset, config, overrides)
    if (data is None) == (train_file is None):
        raise UserError(
            "say what to train on: either --data NAME, or --train FILE with or without --test FILE"
        )
    if data is not None and test_file is not None:
        raise UserError("--test belongs to --train; with --data the set's own test split is used")

    from dslide.bench.records import Recorder
    from dslide.progress import on_stderr
    from dslide.trainer import train as run

    _handle_signals()
    dataset = _dataset(data, train_file, test_file)
    resume = _run_folder(comm, out, resume)
    step = None
    if resume:
        from dslide.checkpoint import read_progress

        step = int(read_progress(out / "checkpoint")["step"])
    recorder = Recorder.of(comm, out, resume_step=step)
    result = run(
        settings,
        dataset,
        comm,
        recorder,
        out,
        resume=resume,
        progress=on_stderr(comm.rank),
    )
    if comm.rank == 0:
        _print_result(result, as_json)
    comm.barrier()
    if result["status"] == "diverged":
        raise typer.Exit(1)


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    from dslide.memory import gib

    if as_json:
        print(json.dumps(result), flush=True)
        return
    print(
        f"{result['status']}: {result['epochs']:.2f} epochs, {result['steps']} steps, "
        f"{result['train_seconds']:.2f} s, {result['samples_per_second']:,.0f} samples/s"
    )
    if result["p1"] is not None:
        print("  ".join(f"P@{k} {100 * result[f'p{k}']:.2f} %" for k in (1, 3, 5)))
    print(
        f"memory: {gib(result['peak_rss_bytes'])} a rank at the peak, "
        f"{result['bytes_per_parameter']:.2f} bytes a parameter of {result['parameters']:,}"
        + (f"; hash tables {gib(result['table_bytes'])} of it" if result["table_bytes"] else "")
    )
    if result["model"] is not None:
        print(f"model: {result['model']}")
    sys.stdout.flush()


def _handle_signals() -> None:
    """SIGTERM, which mpirun makes of Ctrl-C, unwinds like SIGINT, which no shell's `&` may switch off."""

    def terminate(_number: int, _frame: Any) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _dataset(data: str | None, train_file: Path | None, test_file: Path | None) -> "Dataset":
    from dslide import data as sets

    if data is not None:
        return sets.load(data)
    assert train_file is not None
    for file in (train_file, test_file):
        if file is not None and not file.is_file():
            raise UserError(f"{file}: no such file")
    return sets.from_files(train_file, test_file)


_PRODUCTS = ("meta.json", "events.jsonl", "predictions", "checkpoint", "model", "log.txt")


def _run_folder(comm: "LocalComm", out: Path, resume: bool) -> bool:
    """Checks and clears the run's folder on rank 0; whether to resume. UserError on every rank."""
    problem = None
    if comm.rank == 0:
        try:
            resume = _clear(out, resume)
        except UserError as error:
            problem = str(error)
    problem, resume = comm.bcast((problem, resume))
    if problem is not None:
        raise UserError(problem)
    return resume


def _clear(out: Path, resume: bool) -> bool:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: not a folder; --out is the run's folder")
    content = {file.name for file in out.iterdir()} if out.exists() else set()
    if content and not content & set(_PRODUCTS):
        raise UserError(f"{out}: holds files but no run; --out takes a new folder or one of an earlier run")
    unfinished = (out / "checkpoint" / "progress.json").exists()
    if resume:
        if not content:
            raise UserError(f"{out}: no run there to resume")
        if not unfinished:
            print(f"{out}: no checkpoint yet, starting from the beginning", file=sys.stderr)
        return unfinished
    if unfinished and not (out / "model").exists():
        raise UserError(
            f"{out}: holds the checkpoint of an unfinished run; go on with --resume, or delete the folder"
        )
    left = [
        path for pattern in (".model.*", ".checkpoint*", "checkpoint-member-*") for path in out.glob(pattern)
    ]
    for path in [*(out / name for name in _PRODUCTS), *left]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return False


@app.command()
def tune(
    out: Annotated[Path, typer.Option("--out", help="The record: a JSON file of all trials.")],
    data: Data = None,
    train_file: TrainFile = None,
    minutes: Annotated[float, typer.Option("--minutes", help="When to stop.", min=0.01)] = 10.0,
    trials: Annotated[int | None, typer.Option("--trials", help="At most so many.", min=1)] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Settings to begin with.")] = None,
    sets: Sets = None,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of every random draw.", min=0)] = 0,
) -> None:
    """Search good settings on a validation part of the training set; prints a file for train --config."""
    from dslide.comm import under_mpi
    from dslide.config import build_config, merge, parse_sets
    from dslide.tune import Tuning, display

    if under_mpi():
        raise UserError("dslide tune runs in one process, without mpiexec")
    if (data is None) == (train_file is None):
        raise UserError("say what to tune on: either --data NAME or --train FILE")
    settings = build_config(None, config, merge(parse_sets(sets or []), {"threads": threads, "seed": seed}))
    _handle_signals()
    tuning = Tuning(settings, _dataset(data, train_file, None), out, minutes)
    with display(minutes) as tell:
        best = tuning.run(trials, tell)
    print(tuning.yaml(best), end="", flush=True)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a model's.")],
    data: Annotated[str | None, typer.Option("--data", help="A data set's name: its test split.")] = None,
    test_file: Annotated[Path | None, typer.Option("--test", help="Points in the XC format.")] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Exact P@1, P@3 and P@5 of a model over all labels."""
    from dslide import comm as comms
    from dslide.inference import Model
    from dslide.metrics import precision_at

    comm = comms.world()
    if (data is None) == (test_file is None):
        raise UserError("say what to evaluate on: either --data NAME or --test FILE")
    model = Model.load(run, comm, threads)
    points = _dataset(data, None, None).test if data is not None else _dataset(None, test_file, None).train
    source = data or str(test_file)
    ids, _, _ = model.topk(points, 5, source)
    if comm.rank == 0:
        precision = precision_at(ids, points.y_indptr, points.y_indices)
        result: dict[str, Any] = {"points": len(points), "data": source, "model": str(model.folder)}
        result |= {f"p{k}": value for k, value in precision.items()}
        if as_json:
            print(json.dumps(result), flush=True)
        else:
            print(
                f"{len(points)} points  " + "  ".join(f"P@{k} {100 * v:.2f} %" for k, v in precision.items())
            )


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a model's.")],
    source: Annotated[
        Path,
        typer.Option(
            "--input", help="Points in the XC format, plain or .gz; labels may be absent. -: stdin."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Tab-separated: row, position, label, probability. -: stdout.")
    ],
    k: Annotated[int, typer.Option("--k", help="Labels a point.", min=1)] = 5,
    threads: Threads = 0,
    header: Annotated[
        bool, typer.Option("--header/--no-header", help="The first line holds the three sizes.")
    ] = True,
    index_base: Annotated[
        int, typer.Option("--index-base", help="Id of the first feature: 0 or 1.", min=0, max=1)
    ] = 0,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Score only labels that hash tables propose.")
    ] = False,
    family: Annotated[
        str, typer.Option("--family", help="With --approximate: simhash, dwta, wta or doph.")
    ] = "simhash",
    codes: Annotated[
        int | None, typer.Option("--hash-k", help="With --approximate: codes a table.", min=1)
    ] = None,
    tables: Annotated[int | None, typer.Option("--hash-l", help="With --approximate: tables.", min=1)] = None,
    candidates: Annotated[
        int | None, typer.Option("--candidates", help="With --approximate: labels scored a point.", min=1)
    ] = None,
) -> None:
    """The k best labels of every point with their softmax probability over all labels. Rows count from 0."""
    from dslide import comm as comms
    from dslide.data.layout import Layout
    from dslide.inference import Model, Tables
    from dslide.predicting import predict_file

    if not approximate and (codes, tables, candidates) != (None, None, None):
        raise UserError("--hash-k, --hash-l and --candidates belong to --approximate")
    comm = comms.world()
    _handle_signals()
    model = Model.load(run, comm, threads, Tables(family, codes, tables, candidates) if approximate else None)
    points = predict_file(model, source, out, k, Layout(header=header, index_base=index_base))
    if comm.rank == 0:
        print(f"{'standard output' if out == Path('-') else out}: {points} points", file=sys.stderr)
    comm.barrier()


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check what this machine can run, with a remedy for what it cannot."""
    from dslide import doctor as checks

    found = checks.run()
    if as_json:
        print(json.dumps([check.as_dict() for check in found]), flush=True)
    else:
        checks.show(found)
    if any(check.required and not check.ok for check in found):
        raise typer.Exit(1)


def _mount(module: str, name: str, extra: str) -> None:
    """Adds another part's commands; where a package that it needs is absent, a command that says so."""
    try:
        app.add_typer(importlib.import_module(module).app, name=name)
    except ImportError as error:
        missing = error.name or str(error)

        def unavailable() -> None:
            raise UserError(f"dslide {name}: {missing} is not installed; pip install 'dslide[{extra}]'")

        context = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, help=f"(needs dslide[{extra}])", context_settings=context)(unavailable)


_mount("dslide.data.cli", "data", "all")
_mount("dslide.bench.cli", "bench", "harness")
_mount("dslide.bench.race_cli", "race", "harness")


def _say(message: str) -> None:
    comms = sys.modules.get("dslide.comm")
    print(f"dslide: {comms.rank_name() if comms else ''}{message}", file=sys.stderr, flush=True)


def _give_way() -> None:
    """What happens to every rank is told, and recorded, by rank 0, which then ends the job."""
    comms = sys.modules.get("dslide.comm")
    if comms is not None and comms.rank() > 0:
        time.sleep(3.0)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _status(arguments: list[str] | None) -> int:
    try:
        command = typer.main.get_command(app)
        status = command.main(args=arguments, prog_name="dslide", standalone_mode=False)
        status = status if isinstance(status, int) else 0
    except UserError as error:
        _give_way()
        _say(str(error))
        return 2
    except BrokenPipeError:
        return 1
    except OSError as error:
        _give_way()
        if error.errno in _FULL:
            _say(f"{error.filename or 'writing'}: {error.strerror}; make room there, or write elsewhere")
        else:
            _say(traceback.format_exc())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        if hasattr(error, "show") and hasattr(
            error, "exit_code"
        ):  # a mistake in the arguments (click's own class)
            error.show()
            return int(error.exit_code)
        _say(traceback.format_exc())
        return 1
    if status in (130, 143):
        _give_way()
        _say("interrupted" if status == 130 else "terminated")
    return status


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    status = _status(arguments)
    comms = sys.modules.get("dslide.comm")
    if comms is not None:
        comms.leave(status)
    raise SystemExit(status)
