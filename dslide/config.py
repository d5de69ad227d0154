"""What a training run is: pydantic models, presets, and the way from a command line to them."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dslide import MOST_THREADS
from dslide.errors import UserError


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt setting must not pass silently."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class LshConfig(Strict):
    """Hash tables over a layer's neurons, queried with the activations that come into it."""

    family: Literal["simhash", "dwta", "wta", "doph"] = Field(
        default="simhash",
        description="signs of random projections; winner-take-all, densified or not; min-hash of the largest "
        "quarter of the coordinates",
    )
    K: int = Field(default=9, ge=1, le=24, description="codes a table, of one bit (simhash) or three")
    L: int = Field(default=50, ge=1, le=4096, description="tables")
    projections: Literal["sparse", "dense"] = Field(
        default="sparse", description="simhash's: +-1 on a third of the coordinates, or normal on all"
    )
    zeros: Literal["missing", "values"] = Field(
        default="missing", description="dwta, wta: whether a zero may win, as in the published code's query"
    )
    packing: Literal["exact", "published"] = Field(
        default="exact",
        description="published: 2 bits for each of 8 positions (dwta, wta), as the published code packs them",
    )
    bucket_cap: int = Field(default=128, ge=1, description="ids that a bucket holds")
    bucket_policy: Literal["fifo", "reservoir"] = Field(
        default="fifo", description="of a full bucket: the oldest leave, or a uniform sample stays"
    )
    selection: Literal["union", "vanilla", "top-k", "threshold"] = Field(
        default="union",
        description="of the ids in a point's L buckets: all; those of random tables until there are beta; "
        "the beta with the most hits; those with min_hits hits",
    )
    beta: int = Field(
        default=1000, ge=1, description="ids that vanilla and top-k take, own labels not counted"
    )
    min_hits: int = Field(default=2, ge=1, description="buckets that threshold wants an id to be in")
    min_active: int = Field(default=1500, ge=0, description="a point with fewer active neurons is topped up")
    top_up: int = Field(default=1000, ge=0, description="... to this many, at random")
    rebuild_points: int = Field(
        default=6400, ge=1, description="training points before the first rebuild of the tables"
    )
    rebuild_growth: float = Field(
        default=1.0, ge=1, description="every gap between rebuilds is this many times the one before"
    )
    new_functions_points: int = Field(
        default=128_000, ge=1, description="training points between new hash functions"
    )

    @model_validator(mode="after")
    def _combinations(self) -> "LshConfig":
        if self.K > 8 and self.family != "simhash":
            raise ValueError(f"K may be at most 8 with family {self.family} (2^24 buckets a table)")
        return self


class HiddenLayerConfig(Strict):
    """A hidden layer after the first, with the network's activation."""

    units: int = Field(ge=1)
    sampler: Literal["full", "uniform", "lsh"] = Field(
        default="full",
        description="units computed in training: all, with dropout; uniform draws, the same for all points "
        "of a batch; a point's answer from hash tables. Predictions use all",
    )
    draws: int = Field(default=0, ge=0, description="uniform draws a batch, with replacement")
    lsh: LshConfig = LshConfig()

    @model_validator(mode="after")
    def _draws(self) -> "HiddenLayerConfig":
        if self.sampler == "uniform" and self.draws == 0:
            raise ValueError("sampler uniform needs draws > 0")
        if self.sampler != "uniform" and self.draws > 0:
            raise ValueError(f"draws is for sampler uniform, not {self.sampler}")
        return self


def _layer(value: Any) -> Any:
    """A layer's units alone, as a number, stand for the layer."""
    return {"units": value} if isinstance(value, int) and not isinstance(value, bool) else value


HiddenLayer = Annotated[
    HiddenLayerConfig, BeforeValidator(_layer, json_schema_input_type=int | HiddenLayerConfig)
]


class NetworkConfig(Strict):
    """Sparse input -> `hidden` units -> `hidden_layers`, if any -> all labels."""

    hidden: int = Field(default=128, ge=1, description="units of the first hidden layer")
    hidden_layers: list[HiddenLayer] = Field(
        default=[], description="further hidden layers in order; a number stands for a layer's units"
    )
    input_power: float = Field(
        default=1.0,
        gt=0,
        description="features' values are raised to it and a point's scaled to unit norm; 1: as they are",
    )
    activation: Literal["relu", "leaky-relu"] = "leaky-relu"
    slope: float = Field(default=0.4, ge=0, lt=1, description="leaky-relu's slope below zero")
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="probability that a hidden unit is dropped in training"
    )
    input_init_std: float = Field(
        default=0.05, ge=0, description="standard deviation of the first embedding rows"
    )
    output_init: Literal["class-mean", "normal"] = Field(
        default="class-mean",
        description="class-mean: the unit-normalised sum over a label's points of (h - mean h)",
    )
    output_init_std: float = Field(
        default=0.01, ge=0, description="standard deviation with output_init: normal"
    )
    bias: bool = Field(default=False, description="biases in all layers")

    def layer_units(self) -> list[int]:
        """Units of the further hidden layers."""
        return [layer.units for layer in self.hidden_layers]


class SamplerConfig(Strict):
    """Which output neurons a point touches: its own labels, and what `kind` and the extras add.

    in-batch, uniform and log-uniform are one set for all points of a batch, to which any extras may be added;
    lsh gives each point a set of its own.
    """

    kind: Literal["in-batch", "uniform", "log-uniform", "lsh", "full"] = Field(
        default="in-batch",
        description="in-batch: labels of the whole batch; uniform, log-uniform: own labels and extras alone",
    )
    uniform_extras: int = Field(default=0, ge=0, description="uniform draws a batch")
    log_uniform_extras: int = Field(
        default=0, ge=0, description="log-uniform draws a batch over labels ranked by frequency"
    )
    lsh_extras: int = Field(
        default=0,
        ge=0,
        description="a point's ids with the most hits in the hash tables, shared by all points",
    )
    log_q: bool = Field(
        default=True,
        description="subtract the log of the inclusion probability from sampled logits (lsh's isn't known)",
    )
    lsh: LshConfig = LshConfig()


class OptimizerConfig(Strict):
    """Row-wise Adagrad (one float of state a row and block), or Adam.

    `adam` moves every weight at every step, as the published SLIDE does. `adam-catch-up` is the same method
    to within rounding: rows that get no gradient make their missed steps together, when they are next read.
    """

    kind: Literal["adagrad", "adam", "adam-catch-up"] = "adagrad"
    learning_rate: float = Field(default=0.1, gt=0)
    decay: Literal["linear", "constant"] = Field(
        default="linear", description="linear: to 0 over the run's total steps"
    )
    eps: float = Field(default=1e-8, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    initial_accumulator_input: float = Field(
        default=1e-8, ge=0, description="Adagrad's first accumulator, input rows"
    )
    initial_accumulator_output: float = Field(
        default=1e-7, ge=0, description="Adagrad's first accumulator, output rows"
    )

    @model_validator(mode="after")
    def _betas(self) -> "OptimizerConfig":
        if self.kind == "adam-catch-up" and self.beta1 > self.beta2**5:
            raise ValueError("kind adam-catch-up needs beta1 <= beta2^5; take kind adam, or another beta")
        return self


class RanksConfig(Strict):
    """How ranks share the work: each of `groups` groups of `shards` ranks trains its share of the ensemble's
    members, one after another. Placement, and no part of the model."""

    shards: int | None = Field(
        default=None, ge=1, description="ranks that a network is cut over; null: all ranks, divided by groups"
    )
    groups: int = Field(default=1, ge=1, description="members trained at a time")

    def check(self, ranks: int, members: int) -> None:
        """Raises:
        UserError: so many ranks cannot be grouped so, or there are more groups than members.
        """
        if self.groups > members:
            raise UserError(f"ranks.groups {self.groups}: must be at most ensemble, {members}")
        shards = self.shards or max(1, ranks // self.groups)
        needed = self.groups * shards
        if needed != ranks:
            raise UserError(
                f"ranks.groups {self.groups} of ranks.shards {shards} need {needed} ranks, and the job has "
                f"{ranks}: start it under mpiexec -n {needed}, or change them"
            )


class ExchangeConfig(Strict):
    """How a step's exchange between ranks is hidden behind its computation."""

    parts: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="of a batch, computed and sent one behind the other; null: 1, 2 or 3, whichever is "
        "fastest in the first steps. The model is the same. Further hidden layers, lsh and lsh_extras take "
        "whole batches",
    )
    stale_after: int | None = Field(
        default=None,
        ge=0,
        description="steps after which the input layer's gradients are applied one step late, so that all of "
        "the exchange is hidden, for links of high latency; null: never. It changes the model",
    )


class TrainConfig(Strict):
    """Everything that decides a training run besides the data and the machine."""

    network: NetworkConfig = NetworkConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: Literal["softmax"] = "softmax"
    point_weight: Literal["none", "sqrt-labels"] = "sqrt-labels"
    batch_size: int = Field(default=256, ge=1, description="points a step, over all ranks")
    epochs: float = Field(default=6, ge=0)
    wire: Literal["fp32", "bf16", "int8"] = Field(
        default="int8", description="format of the rows that ranks exchange"
    )
    exchange: ExchangeConfig = ExchangeConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the weights and Adam's moments, those between hidden layers aside, which stay "
        "float32; bfloat16 is updated in float32 and rounded stochastically",
    )
    ensemble: int = Field(
        default=1, ge=1, description="networks, trained apart, whose probabilities are averaged"
    )
    ranks: RanksConfig = RanksConfig()
    seed: int = Field(default=0, ge=0, lt=2**63)
    threads: int = Field(
        default=0, ge=0, le=MOST_THREADS, description="threads a rank; 0: all cores that it may use"
    )
    eval_epochs: list[float] | None = Field(
        default=None, description="where to evaluate; null: after every whole epoch"
    )
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: none")
    budget_seconds: float | None = Field(
        default=None, gt=0, description="training seconds after which the run stops"
    )
    target: float | None = Field(
        default=None, ge=0, le=1, description="P@1 (a fraction) at which the run stops"
    )

    @model_validator(mode="after")
    def _combinations(self) -> "TrainConfig":
        sampler = self.sampler
        extras = {
            "uniform_extras": sampler.uniform_extras,
            "log_uniform_extras": sampler.log_uniform_extras,
            "lsh_extras": sampler.lsh_extras,
        }
        if sampler.kind in ("uniform", "log-uniform"):
            needed = sampler.kind.replace("-", "_") + "_extras"
            if extras[needed] == 0:
                raise ValueError(f"sampler.kind {sampler.kind} needs sampler.{needed} > 0")
        if sampler.kind in ("lsh", "full"):
            for name, number in extras.items():
                if number > 0:
                    raise ValueError(f"sampler.{name} can't be added to sampler.kind {sampler.kind}")
        if self.precision == "bfloat16":
            network = self.network
            ends = {"network.hidden": network.hidden}  # the layers next to rows in bfloat16
            if network.hidden_layers:
                ends["units of the last of network.hidden_layers"] = network.layer_units()[-1]
            for name, units in ends.items():
                if units % 2:
                    raise ValueError(
                        f"precision bfloat16 needs an even {name}, not {units}: "
                        "its products take units in pairs"
                    )
        if self.exchange.stale_after is not None:
            if self.network.hidden_layers:
                raise ValueError(
                    "exchange.stale_after is for one hidden layer: leave out network.hidden_layers"
                )
            if self.optimizer.kind == "adam-catch-up":
                raise ValueError(
                    "exchange.stale_after doesn't go with optimizer.kind adam-catch-up, which brings rows up "
                    "to date where they are read: take adagrad or adam"
                )
        return self

    def evaluation_epochs(self) -> list[float]:
        """`eval_epochs`, or every whole epoch."""
        if self.eval_epochs is not None:
            return self.eval_epochs
        return [float(epoch) for epoch in range(1, int(self.epochs) + 1)]

    def model_dict(self) -> dict[str, Any]:
        """What defines the trained model: without threads and placement, without when to look or stop."""
        other = dict.fromkeys(("threads", "ranks", "eval_epochs", "budget_seconds", "target"), True)
        return self.model_dump(mode="json", exclude={**other, "exchange": {"parts"}})


# `default` is the class defaults. `slide` is the papers' algorithm: hash tables, Adam (dense in effect:
# adam-catch-up differs from it by rounding), no correction of the sampled softmax, N(0, 0.01^2) weights and
# biases, a constant rate; hash family, K, L, rate and eps are those of the recorded search
# (results/reference/search/slide.json). `accurate` is what validation found better on all sets at the same
# cost (docs/accuracy.md).
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "slide": {
        "network": {
            "activation": "relu", "dropout": 0.0, "input_init_std": 0.01,
            "output_init": "normal", "output_init_std": 0.01, "bias": True,
        },
        "sampler": {"kind": "lsh", "log_q": False, "lsh": {"family": "dwta", "K": 4, "L": 50}},
        "optimizer": {"kind": "adam-catch-up", "learning_rate": 0.01, "decay": "constant", "eps": 1e-5},
        "point_weight": "none",
        "epochs": 5,
    },
    "accurate": {
        "network": {"input_power": 1.25, "slope": 0.8},
    },
}  # fmt: skip


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, nested dictionaries merged key by key; neither is changed."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _keys(field.annotation, f"{prefix}{name}.")
    return keys


def _unknown(key: str, source: str) -> UserError:
    valid = _keys(TrainConfig)
    leaf = [k for k in valid if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    close = leaf or difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return UserError(f"{source}: unknown key '{key}'; the closest valid key is '{close[0]}'")


def from_dotted(pairs: dict[str, Any], source: str) -> dict[str, Any]:
    """`{"a.b": 1}` -> `{"a": {"b": 1}}`; raises UserError for a key that TrainConfig does not have."""
    valid, nested = set(_keys(TrainConfig)), dict[str, Any]()
    for key, value in pairs.items():
        if key not in valid:
            raise _unknown(key, source)
        *path, leaf = key.split(".")
        tree: dict[str, Any] = {}
        spot = tree
        for part in path:
            spot = spot.setdefault(part, {})
        spot[leaf] = value
        nested = merge(nested, tree)
    return nested


def parse_sets(sets: list[str]) -> dict[str, Any]:
    """`key.sub=value` arguments as a nested dictionary; values are YAML, typed later by the model."""
    pairs = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(
                f"--set {text}: write it as key=value, for example --set optimizer.learning_rate=0.05"
            )
        try:
            pairs[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not valid YAML") from error
    return from_dotted(pairs, "--set")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping; raises UserError naming the file and line."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such config file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a config is a mapping of keys to values, not a {type(content).__name__}")
    return content


def validated(values: dict[str, Any], source: str) -> TrainConfig:
    """The model of `values`; raises UserError naming `source`, every bad key and its reason."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        reasons = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                raise _unknown(key, source) from error
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            reasons.append(f"{key or 'config'}: {item['msg']}{got}")
        raise UserError(f"{source}: " + "; ".join(reasons)) from error


def build_config(
    preset: str | None = None,
    file: Path | None = None,
    overrides: dict[str, Any] | None = None,
) -> TrainConfig:
    """Resolves preset < file < overrides (a nested dictionary). A file may name its own `preset`."""
    source, values = "config", dict[str, Any]()
    if file is not None:
        source, values = str(file), read_yaml(file)
        inner = values.pop("preset", None)
        preset = preset or inner
    name = preset or "default"
    if name not in PRESETS:
        raise UserError(f"unknown preset '{name}'; there are: {', '.join(PRESETS)}")
    if file is not None:
        validated(merge(PRESETS[name], values), source)  # so that a mistake in the file is told as the file's
    return validated(merge(merge(PRESETS[name], values), overrides or {}), "--set" if overrides else source)
