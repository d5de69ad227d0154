"""Networks of about a billion parameters on virtual nodes: speed, memory a node, bytes a sample, the loss."""

from statistics import fmean, median

import pandas as pd

from dslide.bench.records import Run
from dslide.paths import content_root
from dslide.reporting import facts, reference
from dslide.reporting.output import Table
from dslide.reporting.race import Race

TITLE = "A billion parameters"
LEAST = 500_000_000  # parameters of a network that this table is about
PART = 10  # steps at the beginning and at the end whose loss is told


def runs(race: Race) -> list[Run]:
    """Timed runs of such networks: the experiment's own, or the reference records."""
    sweep = race.spec.sweep
    own = [
        run
        for cluster in (sweep.clusters if sweep else [])
        for extras in (sweep.uniform_extras if sweep else [])
        for run in race.seeds("sweep", f"extras-{extras}", cluster)
    ]
    large = [run for run in own if int(run.meta.get("parameters") or 0) >= LEAST]
    kept = [
        run
        for run in reference.runs(content_root(), "sweep", experiments=True)
        if int(run.meta.get("parameters") or 0) >= LEAST
    ]
    return large or kept


def table(race: Race) -> Table:
    data, rows = [], []
    for run in runs(race):
        end, steps = run.end or {}, run.of("step")
        if run.status != "done" or not steps:
            continue
        ranks = end["ranks"]
        losses = [step["loss"] for step in steps]
        record = {
            "cluster": reference.where(run),
            "parameters": run.meta["parameters"],
            "samples_per_second": run.meta["batch_size"] / median(step["seconds"] for step in steps),
            "memory_bytes_a_node": max(rank["peak_rss_bytes"] for rank in ranks),
            "bytes_a_parameter": sum(rank["training_bytes"] for rank in ranks) / run.meta["parameters"],
            "bytes_a_sample": end["payload_bytes"] / end["samples"],
            "loss_first": fmean(losses[:PART]),
            "loss_last": fmean(losses[-PART:]),
            "steps": len(steps),
            "oversubscribed": bool((run.meta.get("cluster") or {}).get("oversubscribed")),
        }
        data.append(record)
        rows.append(
            {
                "cluster": record["cluster"]
                + (" (more nodes than cores)" if record["oversubscribed"] else ""),
                "parameters": f"{record['parameters']:,}",
                "samples/s": f"{record['samples_per_second']:,.0f}",
                "memory a node": f"{record['memory_bytes_a_node'] / 2**30:.2f} GiB",
                "bytes a parameter": f"{record['bytes_a_parameter']:.2f}",
                "bytes a sample, all nodes": f"{record['bytes_a_sample']:,.0f}",
                f"loss, first and last {PART} of {len(steps)} steps": (
                    f"{record['loss_first']:.2f}, {record['loss_last']:.2f}"
                ),
                "machine": str(facts.dig(run.meta, "machine", "cpu", "model")),
            }
        )
    notes = [
        "Timed steps on a synthetic twin of Amazon-670K (config/billion.yaml, config/five-billion.yaml); "
        "median step, links throttled."
    ]
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes if rows else [])
