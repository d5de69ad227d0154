"""Checkpoints: the parameters, the optimiser's state and how far training is.

Nothing else has a memory: random draws are keyed by (seed, purpose, step, id), the batch order by (seed,
epoch), and hash tables are rebuilt at every checkpoint, in the run that goes on too. So a resumed run equals
the other bit by bit. A checkpoint may be resumed with another number of ranks; then sums are ordered
otherwise.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslide.errors import UserError
from dslide.files import write_atomic
from dslide.network import MEMBER, Manifest, load_tensors, manifest, save_shards, shared_dir

if TYPE_CHECKING:
    from dslide.trainer import Trainer


def write(trainer: "Trainer", path: Path) -> None:
    """Replaces the checkpoint in `path`, which is the old one or the new one at any time. Collective."""
    comm, network = trainer.comm, trainer.network
    sent = comm.gather((comm.payload_bytes, comm.other_bytes))
    with shared_dir(comm, path) as work:
        save_shards(work / MEMBER, comm.rank, network.weights() | network.state())
        if comm.rank == 0:
            assert sent is not None
            data = {"name": trainer.dataset.name, "hash": trainer.dataset.hash}
            write_atomic(
                work / "manifest.json", json.dumps(manifest(network, data, trainer.step), indent=1) + "\n"
            )
            progress = {
                "step": trainer.step,
                "samples": trainer.samples,
                "train_seconds": trainer.recorder.clock.seconds,
                "cpu_seconds": trainer.recorder.clock.cpu_seconds,
                "tx_bytes": trainer.recorder.clock.tx_bytes,
                "rx_bytes": trainer.recorder.clock.rx_bytes,
                "payload_bytes": trainer._earlier["payload_bytes"] + sum(part[0] for part in sent),
                "other_bytes": trainer._earlier["other_bytes"] + sum(part[1] for part in sent),
                "last_eval": trainer.last_eval,
            }
            write_atomic(work / "progress.json", json.dumps(progress, indent=1) + "\n")
    trainer.recorder.event("checkpoint", step=trainer.step, epoch=trainer.samples / trainer.points)


def read_progress(path: Path) -> dict[str, Any]:
    """The progress of the checkpoint in folder `path`; UserError if there is none."""
    try:
        return json.loads((path / "progress.json").read_text())  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no checkpoint to resume from; train with --set checkpoint_every=STEPS to make some"
        ) from error
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path / 'progress.json'}: broken: {error}") from error


def restore(trainer: "Trainer", path: Path) -> None:
    """Sets the trainer to the checkpoint in `path`; UserError if it is of another config or other data."""
    progress, source = read_progress(path), Manifest.read(path)
    if source.content["data"]["hash"] != trainer.dataset.hash:
        raise UserError(
            f"{path}: the checkpoint was trained on {source.content['data']['name']}, not on these data"
        )
    mine, theirs = trainer.config.model_dict(), source.config.model_dict()
    if mine["optimizer"]["decay"] == "constant":  # then a longer run is the continuation of a shorter one
        mine["epochs"] = theirs["epochs"]
    other = [key for key in mine if mine[key] != theirs[key]]
    if other:
        raise UserError(
            f"{path}: the checkpoint has another {', '.join(other)}; resume with the same configuration"
        )
    network = trainer.network
    load_tensors(network, source, path / MEMBER, network.weights() | network.state())
    trainer.step, trainer.samples = progress["step"], progress["samples"]
    trainer._earlier = {"payload_bytes": progress["payload_bytes"], "other_bytes": progress["other_bytes"]}
    trainer.last_eval = progress["last_eval"]
    mine_only = trainer.comm.rank == 0
    trainer.recorder.clock.restore(
        progress["train_seconds"],
        progress["cpu_seconds"] if mine_only else 0.0,
        progress["tx_bytes"] if mine_only else 0,
        progress["rx_bytes"] if mine_only else 0,
    )
