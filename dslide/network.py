"""A rank's shard of the network: its layers, its files, and the shapes that both agree on.

A model is a folder: manifest.json and member-<k>/shard-<r>.safetensors, one member or the several of an
ensemble. It holds neither times nor the number
of threads, so the same seed gives the same bytes. Every tensor is cut along one axis (hidden units or
labels), and loading reads slices, so a model of P shards loads into Q ranks.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dslide import _core
from dslide.comm import LocalComm, cuts
from dslide.config import TrainConfig
from dslide.depth import HiddenLayer
from dslide.errors import UserError
from dslide.files import atomic_dir, write_atomic
from dslide.memory import Need

STATE_BLOCK = 16  # hidden units that share one number of Adagrad state; shard borders lie on whole blocks
FORMAT = "dslide-model"
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_PIECE_BYTES = 64 << 20  # of a tensor, read at once
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Shape:
    """The network's size and how P ranks share it: offsets [P + 1] of hidden units and of labels."""

    features: int
    hidden: int
    labels: int
    hidden_cuts: list[int]
    label_cuts: list[int]
    layer_cuts: list[list[int]] = field(default_factory=list)  # of the further hidden layers' units

    @classmethod
    def of(
        cls,
        features: int,
        hidden: int,
        labels: int,
        ranks: int,
        label_block: int = 1,
        layers: Sequence[int] = (),
    ) -> "Shape":
        """Near-equal parts of whole blocks; a rank may get no hidden units or no labels. `layers`: units of
        the further hidden layers."""
        return cls(
            features,
            hidden,
            labels,
            cuts(hidden, ranks, STATE_BLOCK),
            cuts(labels, ranks, label_block),
            [cuts(units, ranks, STATE_BLOCK) for units in layers],
        )

    @property
    def width(self) -> int:
        """Units of the last hidden layer: inputs of an output row."""
        return self.layer_cuts[-1][-1] if self.layer_cuts else self.hidden

    @property
    def inputs(self) -> list[int]:
        """Of each further hidden layer's units, and last of the output rows."""
        return [self.hidden, *(offsets[-1] for offsets in self.layer_cuts)]

    def _layer_weights(self, rank: int) -> int:
        """Of a rank's further hidden layers."""
        own = [offsets[rank + 1] - offsets[rank] for offsets in self.layer_cuts]
        return sum(units * inputs for units, inputs in zip(own, self.inputs, strict=False))

    def weight_bytes(self, rank: int, config: TrainConfig) -> int:
        """What a rank's weights take, biases aside; further hidden layers are float32 in any precision."""
        h = self.hidden_cuts[rank + 1] - self.hidden_cuts[rank]
        own = self.label_cuts[rank + 1] - self.label_cuts[rank]
        wide = self.features * h + own * self.width
        return _WEIGHT_BYTES[config.precision] * wide + 4 * self._layer_weights(rank)

    def parameters(self, config: TrainConfig) -> int:
        """Of the whole network, biases included."""
        sizes = [self.features, *self.inputs, self.labels]
        weights = sum(above * below for below, above in itertools.pairwise(sizes))
        return weights + (sum(sizes[1:]) if config.network.bias else 0)

    def memory(self, rank: int, config: TrainConfig, label_nnz: int) -> Need:
        """About what a rank allocates; `label_nnz` labels a point."""
        h = self.hidden_cuts[rank + 1] - self.hidden_cuts[rank]
        own = self.label_cuts[rank + 1] - self.label_cuts[rank]
        neurons = own + sum(offsets[rank + 1] - offsets[rank] for offsets in self.layer_cuts)
        weights = self.weight_bytes(rank, config)
        state = (
            4 * (self.features * (h // STATE_BLOCK + 1) + neurons)
            if config.optimizer.kind == "adagrad"
            else 2 * weights
        )
        batch, sampler = config.batch_size, config.sampler
        extras = sampler.uniform_extras + sampler.log_uniform_extras + batch * sampler.lsh_extras
        per_batch = batch * max(1, label_nnz) + extras
        active = own if sampler.kind in ("full", "lsh") else min(own, per_batch)
        pairs = (
            active * batch if sampler.kind != "lsh" else min(active, 4 * sampler.lsh.min_active + 64) * batch
        )
        buffers = 2 * active * self.width + 2 * pairs + 8 * batch * sum(self.inputs)
        # An id and a code a neuron and table.
        tables = sampler.lsh.L * own * 2 if sampler.kind == "lsh" or sampler.lsh_extras else 0
        for layer, offsets in zip(config.network.hidden_layers, self.layer_cuts, strict=True):
            if layer.sampler == "lsh":
                tables += layer.lsh.L * (offsets[rank + 1] - offsets[rank]) * 2
        if config.network.output_init == "class-mean":
            buffers += own * self.width // 4
            if config.network.hidden_layers and config.precision != "float32":
                buffers += own * self.width  # the sums of depth.class_means
        return Need(weights, state, 4 * tables, 4 * buffers)


class Network:
    """The layers of one rank. `input` and `output` are the core's."""

    def __init__(self, config: TrainConfig, shape: Shape, rank: int, pool: Any, *, training: bool) -> None:
        self.config, self.shape, self.rank = config, shape, rank
        net, opt = config.network, config.optimizer
        self.hidden = (shape.hidden_cuts[rank], shape.hidden_cuts[rank + 1])
        self.labels = (shape.label_cuts[rank], shape.label_cuts[rank + 1])
        self.input = _core.InputLayer(pool, self._input_units(*self.hidden))
        self.output = _core.OutputLayer(
            pool,
            shape.labels,
            *self.labels,
            shape.width,
            bias=net.bias,
            init_std=net.output_init_std if net.output_init == "normal" else 0.0,
            seed=config.seed,
            half=config.precision == "bfloat16",
        )
        self.hidden_layers = [
            HiddenLayer(pool, config, layer, number, shape.inputs[number], slice(*offsets[rank : rank + 2]))
            for number, (layer, offsets) in enumerate(zip(net.hidden_layers, shape.layer_cuts, strict=True))
        ]
        if training:
            for layer, accumulator in (
                (self.input, opt.initial_accumulator_input),
                *((layer.rows, opt.initial_accumulator_output) for layer in self.hidden_layers),
                (self.output, opt.initial_accumulator_output),
            ):
                layer.set_optimizer(
                    _core.Optimizer(
                        kind=opt.kind,
                        eps=opt.eps,
                        beta1=opt.beta1,
                        beta2=opt.beta2,
                        initial_accumulator=accumulator,
                    )
                )

    def initialise(self, x: Any, y: Any) -> None:
        """The output rows' data-dependent start, from the training points' core CSR views. Where there are
        several hidden layers, dslide.depth.class_means does it."""
        if self.config.network.output_init == "class-mean":
            self.output.class_mean_init(x, y, self._input_units(0, self.shape.hidden))

    def settle(self) -> None:
        """Makes the steps that rows wait for (adam-catch-up); a training step alone may read rows without."""
        self.input.settle()
        for layer in self.hidden_layers:
            layer.rows.settle()
        self.output.settle()

    def _input_units(self, begin: int, end: int) -> Any:
        net = self.config.network
        return _core.InputConfig(
            self.shape.features,
            self.shape.hidden,
            begin,
            end,
            activation=net.activation,
            slope=net.slope,
            dropout=net.dropout,
            init_std=net.input_init_std,
            bias=net.bias,
            seed=self.config.seed,
            state_block=STATE_BLOCK,
            half=self.config.precision == "bfloat16",
        )

    def weights(self) -> dict[str, NDArray[Any]]:
        """Views of this rank's parameters: weights of the input and output layers in the config's precision,
        everything else in float32."""
        tensors = {f"{name}.weights": _typed(layer.weights) for name, layer in self._named()}
        if self.config.network.bias:
            tensors |= {f"{name}.bias": layer.bias for name, layer in self._named()}
        return tensors

    def state(self) -> dict[str, NDArray[Any]]:
        """Views of this rank's optimiser state: Adam's moments of bfloat16 weights in bfloat16, everything
        else in float32."""
        tensors: dict[str, NDArray[Any]] = {}
        for side, layer in self._named():
            tensors |= {f"{side}.weights.{name}": _typed(array) for name, array in layer.state().items()}
            if self.config.network.bias:
                tensors |= {f"{side}.bias.{name}": array for name, array in layer.bias_state().items()}
        return tensors

    def _named(self) -> list[tuple[str, Any]]:
        """The core's layers by their tensors' names."""
        further = [(f"hidden-{layer.number}", layer.rows) for layer in self.hidden_layers]
        return [("input", self.input), ("output", self.output), *further]

    def own_range(self, name: str) -> tuple[int, int, int]:
        """(axis, begin, end) of this rank's part of a tensor in the whole one."""
        layers = [(layer.own.start, layer.own.stop) for layer in self.hidden_layers]
        return _range(name, self.weights() | self.state(), self.hidden, self.labels, layers)


def _typed(array: NDArray[Any]) -> NDArray[Any]:
    """The core's bits of bfloat16, which it has as uint16, as what they are."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def _range(
    name: str,
    tensors: dict[str, NDArray[Any]],
    hidden: tuple[int, int],
    labels: tuple[int, int],
    layers: list[tuple[int, int]],
) -> tuple[int, int, int]:
    if name.startswith("output."):
        return 0, *labels
    if name.startswith("hidden-"):
        return 0, *layers[int(name.removeprefix("hidden-").split(".")[0])]
    axis = tensors[name].ndim - 1
    if name.endswith("accum"):
        return axis, hidden[0] // STATE_BLOCK, -(-hidden[1] // STATE_BLOCK)
    return axis, *hidden


@contextmanager
def shared_dir(comm: LocalComm, path: Path) -> Iterator[Path]:
    """`atomic_dir` for all ranks together: all write into one folder, which takes its place when all have."""
    with ExitStack() as stack:
        work = stack.enter_context(atomic_dir(path)) if comm.rank == 0 else None
        yield comm.bcast(work)
        comm.barrier()
    comm.barrier()


def save_shards(folder: Path, rank: int, tensors: dict[str, NDArray[Any]]) -> None:
    """Writes one rank's tensors as shard-<rank>.safetensors in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / shard_name(rank)
    )


def member_name(member: int) -> str:
    """Folder of a member within a model."""
    return f"member-{member}"


def shard_name(rank: int) -> str:
    """File name of a rank's shard."""
    return f"shard-{rank}.safetensors"


def manifest(
    config: TrainConfig, shape: Shape, data: dict[str, Any], step: int, members: int = 1
) -> dict[str, Any]:
    """What a model's manifest holds: the config that defines it, its data, its members' and shards' offsets.
    `step`: steps of training, of all members together."""
    files = [shard_name(rank) for rank in range(len(shape.label_cuts) - 1)]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "config": config.model_dict(),
        "data": data,
        "features": shape.features,
        "labels": shape.labels,
        "steps": step,
        "ensemble": members,
        "members": [
            {
                "folder": member_name(member),
                "hidden_offsets": shape.hidden_cuts,
                "label_offsets": shape.label_cuts,
                **({"layer_offsets": shape.layer_cuts} if shape.layer_cuts else {}),
                "files": files,
            }
            for member in range(members)
        ],
    }


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes `folder`/manifest.json."""
    write_atomic(folder / "manifest.json", json.dumps(content, indent=1) + "\n")


def save_model(
    comm: LocalComm,
    path: Path,
    content: dict[str, Any],
    members: dict[int, tuple[int, dict[str, NDArray[Any]]]],
    names: list[str] | None,
) -> None:
    """Writes a model's folder; complete or absent. Collective.

    `content` is the manifest, `members` this rank's part of it by member: (number of the shard, tensors).
    """
    with shared_dir(comm, path) as work:
        for member, (shard, tensors) in members.items():
            save_shards(work / member_name(member), shard, tensors)
        if comm.rank == 0:
            write_manifest(work, content)
            if names is not None:
                write_atomic(work / "labels.txt", "".join(f"{name}\n" for name in names))


@dataclass(frozen=True)
class Manifest:
    """A model's manifest, read and checked."""

    path: Path
    content: dict[str, Any]
    config: TrainConfig

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads `folder`/manifest.json; UserError if absent, broken, or of another version."""
        path = folder / "manifest.json"
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise UserError(f"{path}: not a dslide model")
            if content["format_version"] != FORMAT_VERSION:
                raise UserError(
                    f"{path}: format version {content['format_version']}; this dslide reads {FORMAT_VERSION}"
                )
            return cls(folder, content, TrainConfig.model_validate(content["config"]))
        except FileNotFoundError as error:
            raise UserError(
                f"{path}: no trained model there; `dslide train --out RUN` makes RUN/model"
            ) from error
        except (OSError, json.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
            raise UserError(f"{path}: broken manifest: {error}") from error

    def label_names(self) -> list[str] | None:
        """One name a label, if the data had them."""
        path = self.path / "labels.txt"
        return path.read_text().splitlines() if path.exists() else None


def load_tensors(
    network: Network, source: Manifest, tensors: dict[str, NDArray[Any]], number: int = 0
) -> None:
    """Fills this rank's `tensors` (views) from the shard files of member `number`, which may be cut in other
    places."""
    member = source.content["members"][number]
    hidden, labels = member["hidden_offsets"], member["label_offsets"]
    layers = member.get("layer_offsets", [])
    if (
        source.content["features"] != network.shape.features
        or source.content["labels"] != network.shape.labels
    ):
        raise UserError(f"{source.path}: its numbers of features and labels are not the data's")
    for shard, file in enumerate(member["files"]):
        path = source.path / member["folder"] / file
        try:
            for name, target in tensors.items():
                axis, begin, end = network.own_range(name)
                _, first, last = _range(
                    name,
                    tensors,
                    (hidden[shard], hidden[shard + 1]),
                    (labels[shard], labels[shard + 1]),
                    [(offsets[shard], offsets[shard + 1]) for offsets in layers],
                )
                low, high = max(begin, first), min(end, last)
                if low < high:
                    there, here = slice(low - first, high - first), slice(low - begin, high - begin)
                    _copy(path, name, axis, there, target[here] if axis == 0 else target[:, here])
        except FileNotFoundError as error:
            raise UserError(f"{path}: the model's shard is missing") from error
        except (SafetensorError, ValueError, OSError) as error:
            raise UserError(f"{path}: broken shard: {error}") from error


def _copy(path: Path, name: str, axis: int, part: slice, target: NDArray[Any]) -> None:
    """Fills `target` with part of a stored tensor: a piece at a time, the file mapped for that piece alone.
    So loading takes little more memory than the network has."""
    rows = max(1, _PIECE_BYTES // max(1, target.nbytes // max(1, len(target))))
    for begin in range(0, len(target), rows):
        end = min(begin + rows, len(target))
        with safe_open(path, framework="numpy") as stored:
            piece = stored.get_slice(name)
            if axis == 0:
                target[begin:end] = piece[part.start + begin : part.start + end]
            else:
                target[begin:end] = piece[begin:end, part]
