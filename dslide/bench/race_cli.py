"""`dslide race`: run one spec, test a link, compose a curve; and what the workflow asks about an
experiment."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dslide import experiment_cli
from dslide.bench import cluster, systems
from dslide.bench.compose import compose as compose_runs
from dslide.bench.compose import compose_failure, folder_of
from dslide.bench.launch import launch, say
from dslide.bench.records import read_run
from dslide.bench.spec import RunSpec, allotted_cores, bits_per_second
from dslide.errors import UserError
from dslide.files import write_atomic

app = typer.Typer(
    no_args_is_help=True, help="Run systems fairly: one run, a link, a composed curve, an experiment."
)
experiment_cli.register(app)


def _override(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not found:
        raise UserError(f"--set {text}: write key=value, for example cluster.nodes=2")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="The run's instruction, from `dslide race spec`.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: another value for a key.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if the run failed.")] = False,
) -> None:
    """Run one spec and publish its record; prints a JSON summary.

    A run that fails is a record that says why, and exit status 0.
    """
    found = RunSpec.read(spec, dict(_override(text) for text in set_ or []))
    code = launch(found)
    record = read_run(found.out)
    last = record.of("eval")[-1:] or [{}]
    summary = {
        "run_id": found.run_id,
        "status": record.status,
        "reason": record.reason,
        "train_seconds": (record.end or {}).get("train_seconds"),
        **{key: last[0].get(key) for key in ("step", "p1", "p3", "p5")},
        "out": str(found.out),
    }
    print(json.dumps(summary), flush=True)
    if code or (strict and record.status in ("error", "interrupted", "diverged")):
        raise typer.Exit(code or 1)


@app.command()
def compose(
    curve: Annotated[Path, typer.Argument(help="Folder (or stamp) of the run that gives accuracy per step.")],
    pace: Annotated[Path, typer.Argument(help="Folder (or stamp) of the run that gives seconds per step.")],
    out: Annotated[Path, typer.Argument(help="Folder (or stamp `<folder>.done`) to write.")],
    check: Annotated[Path | None, typer.Option(help="A real run on the same link to compare with.")] = None,
) -> None:
    """Put a curve's accuracy per step and a pace's seconds per step together.

    A part that failed makes a record of status `error` that says so, and exit status 0.
    """
    reason = compose_failure(folder_of(curve), folder_of(pace), folder_of(out))
    if reason is not None:
        say(f"not composed: {reason}")
        if out.suffix == ".done":
            write_atomic(out, json.dumps({"status": "error", "reason": reason}) + "\n")
        return
    meta = compose_runs(
        folder_of(curve), folder_of(pace), folder_of(out), None if check is None else folder_of(check)
    )
    times = meta["step_seconds"]
    say(f"{times['median']:.4f} s a step ({times['low']:.4f}-{times['high']:.4f}, {times['steps']} steps)")
    summary = {key: meta.get(key) for key in ("run_id", "step_seconds", "step_check", "check")}
    print(json.dumps(summary), flush=True)
    if out.suffix == ".done":
        write_atomic(out, json.dumps(summary) + "\n")


@app.command()
def link(
    bandwidth: Annotated[str, typer.Option(help="Like 100mbit or 1gbit.")] = "100mbit",
    size: Annotated[list[int] | None, typer.Option(help="Bytes of a message; give several.")] = None,
    nodes: Annotated[int, typer.Option(min=2)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make virtual nodes, throttle their links, and time messages against the rate."""
    try:
        rate = bits_per_second(bandwidth)
    except ValueError as error:
        raise UserError(f"--bandwidth: {error}") from error
    reason = cluster.unavailable()
    if reason is not None:
        raise UserError(f"no virtual nodes here: {reason}")
    request = json.dumps(
        {"nodes": nodes, "rate": rate, "sizes": size or [17_000, 38_000, 300_000, 5_000_000]}
    )
    command = cluster.sandbox_command([sys.executable, "-m", "dslide.bench.race_cli", request], network=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise typer.Exit(1)
    report = json.loads(result.stdout)
    if as_json:
        print(json.dumps(report))
        return
    for line in [*report["sizes"], *report["both_ways"]]:
        times = f"{line['ms']:>10.3f} ms  ideal {line['ideal_ms']:>10.3f} ms"
        print(f"{line['bytes']:>10} B {line['mode']:>6} {times}  {line['verdict']}")
    print(f"faithful: {report['faithful']}; round trip {report['rtt_ms']} ms")
    print(f"{report['lost_packets']} packets lost; {report['congestion_control']}; {report['throttle']}")


@app.command(name="systems")
def list_systems() -> None:
    """List the systems that can race."""
    for name in systems.names():
        print(f"{name}\t{systems.load(name).TITLE}")


def _link_in_sandbox(request: dict[str, Any]) -> None:
    from dslide.bench import link as links

    cluster.prepare_sandbox()
    cores = allotted_cores()
    each = max(1, math.floor(len(cores) / request["nodes"]))
    cluster.make_nodes(cluster.core_sets(cores, request["nodes"], each))
    print(json.dumps(links.throttle_and_check(request["nodes"], request["rate"], request["sizes"])))


if __name__ == "__main__":
    _link_in_sandbox(json.loads(sys.argv[1]))
