"""What one run is: the file that the workflow writes and that the launcher hands to every rank."""

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dslide.errors import UserError
from dslide.files import read_json_object

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def bits_per_second(bandwidth: str) -> float:
    """The rate of "100mbit", "1gbit", "2.5gbit", "56kbit". ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)bit\s*", bandwidth.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"bandwidth {bandwidth!r}: write it like 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def allotted_cores() -> list[int]:
    """The cores that this process may use, by its affinity."""
    return sorted(os.sched_getaffinity(0))


def resolve_cores(
    nodes: int, cores: int | Literal["auto"], *, oversubscribed: bool = False
) -> tuple[int, bool]:
    """Cores a node, and whether that is more than the machine has.

    "auto" divides the allotted cores by the nodes, at least one each. UserError if the nodes want more cores
    than there are and `oversubscribed` does not allow it.
    """
    have = len(allotted_cores())
    each = max(1, have // nodes) if cores == "auto" else int(cores)
    over = each * nodes > have
    if over and not oversubscribed:
        raise UserError(
            f"cluster: {nodes} nodes of {each} cores want {each * nodes} cores, this machine allots {have}; "
            "ask for fewer nodes or cores, or set `oversubscribed: true` (the run and its figure then say so)"
        )
    return each, over


class Cluster(BaseModel):
    """Nodes of a run: how many, their cores, and the rate of each node's link.

    `kind` "virtual": namespaces on this machine; "slurm": the nodes of the job that the launcher runs in;
    "hostfile": those of an MPI host file (`hostfile`). Real links are never throttled or checked.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["virtual", "slurm", "hostfile"] = "virtual"
    hostfile: Path | None = None
    nodes: int = Field(default=1, ge=1, le=200)
    cores: int = Field(default=1, ge=1)
    bandwidth: str | None = None
    oversubscribed: bool = False

    @field_validator("bandwidth")
    @classmethod
    def _parses(cls, value: str | None) -> str | None:
        if value is not None:
            bits_per_second(value)
        return value

    @property
    def rate(self) -> float | None:
        """Bits a second of each node's link, None without a throttle."""
        return None if self.bandwidth is None else bits_per_second(self.bandwidth)


class RunSpec(BaseModel):
    """One run of one system."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    experiment: str = ""
    system: str
    label: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    data: str
    split: Literal["test", "validation"] = "test"
    seed: int = 0
    batch_size: int = Field(default=256, ge=1)
    epochs: float = Field(default=1.0, ge=0)
    # A run may end early on the schedule of a longer one: it checks a composed curve.
    stop_epochs: float | None = Field(default=None, gt=0)
    eval_epochs: list[float] = Field(default_factory=list)
    budget_seconds: float = Field(default=3600.0, gt=0)
    target: float | None = None
    cluster: Cluster = Field(default_factory=Cluster)
    pace_steps: int | None = Field(default=None, ge=1)
    pace_warmup: int = Field(default=2, ge=0)
    exchange: bool = True
    out: Path
    # Of the launcher: what ends a run that hangs, and whether a link that is off refuses the run.
    stall_seconds: float = Field(default=300.0, gt=0)
    grace_seconds: float = Field(default=600.0, ge=0)
    link_check: Literal["mark", "refuse", "off"] = "mark"
    exclusive: bool = True

    @classmethod
    def read(cls, path: Path, overrides: dict[str, Any] | None = None) -> "RunSpec":
        """Reads a spec file; `overrides` are values by dotted key ("cluster.nodes"). UserError names file and
        key."""
        fields = read_json_object(path, "a run's spec")
        for key, value in (overrides or {}).items():
            *parents, last = key.split(".")
            place = fields
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise UserError(f"{path}: key {key}: {parent} is no object")
            place[last] = value
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc'])) or '(whole)'}: {e['msg']}" for e in error.errors()]
            raise UserError(f"{path}: " + "; ".join(lines)) from error

    def dump(self) -> str:
        """The spec as JSON text."""
        return self.model_dump_json(indent=1) + "\n"
