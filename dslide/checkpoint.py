"""Checkpoints: the parameters, the optimiser's state and how far training is.

Nothing else has a memory: random draws are keyed by (seed, purpose, step, id), the batch order by (seed,
epoch), and hash tables are rebuilt at every checkpoint, in the run that goes on too. So a resumed run equals
the other bit by bit. A checkpoint may be resumed with another number of ranks; then sums are ordered
otherwise.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from dslide.errors import UserError
from dslide.files import write_atomic
from dslide.network import (
    Manifest,
    load_tensors,
    manifest,
    member_name,
    save_shards,
    shared_dir,
    write_manifest,
)

if TYPE_CHECKING:
    from dslide.ensemble import EnsembleTrainer
    from dslide.trainer import Trainer


def write(trainer: "Trainer", path: Path) -> None:
    """Replaces the checkpoint in `path`, which is the old one or the new one at any time. Collective."""
    comm, network = trainer.comm, trainer.network
    content = manifest(network.config, network.shape, _data(trainer), trainer.step)
    _write(trainer, path, content, {0: (comm.rank, network.weights() | network.state())})


def write_members(ensemble: "EnsembleTrainer", path: Path) -> None:
    """As `write`, of the members that are trained; one in training has its own checkpoint. Collective."""
    content = manifest(ensemble.config, ensemble.shape, _data(ensemble), ensemble.step, ensemble.done)
    _write(ensemble, path, content, ensemble.shards())


def _data(trainer: "Trainer | EnsembleTrainer") -> dict[str, Any]:
    return {"name": trainer.dataset.name, "hash": trainer.dataset.hash}


def _write(
    trainer: "Trainer | EnsembleTrainer",
    path: Path,
    content: dict[str, Any],
    members: dict[int, tuple[int, dict[str, NDArray[Any]]]],
) -> None:
    comm, clock = trainer.comm, trainer.recorder.clock
    sent = comm.gather(trainer.sent_bytes())
    with shared_dir(comm, path) as work:
        for member, (shard, tensors) in members.items():
            save_shards(work / member_name(member), shard, tensors)
        if comm.rank == 0:
            assert sent is not None
            write_manifest(work, content)
            progress = {
                "step": trainer.step,
                "samples": trainer.samples,
                "train_seconds": clock.seconds,
                "cpu_seconds": clock.cpu_seconds,
                "tx_bytes": clock.tx_bytes,
                "rx_bytes": clock.rx_bytes,
                "payload_bytes": sum(part[0] for part in sent),
                "other_bytes": sum(part[1] for part in sent),
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
    source = _restore(trainer, path)
    load_tensors(trainer.network, source, trainer.network.weights() | trainer.network.state())


def restore_members(ensemble: "EnsembleTrainer", path: Path) -> None:
    """As `restore`, of the members that were trained."""
    source = _restore(ensemble, path)
    for member in range(source.content["ensemble"]):
        ensemble.add(member, source)


def _restore(trainer: "Trainer | EnsembleTrainer", path: Path) -> Manifest:
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
    trainer.step, trainer.samples = progress["step"], progress["samples"]
    trainer.last_eval = progress["last_eval"]
    first = trainer.comm.rank == 0
    if first:
        trainer.earlier = {"payload_bytes": progress["payload_bytes"], "other_bytes": progress["other_bytes"]}
    trainer.recorder.clock.restore(
        progress["train_seconds"],
        progress["cpu_seconds"] if first else 0.0,
        progress["tx_bytes"] if first else 0,
        progress["rx_bytes"] if first else 0,
    )
    return source
