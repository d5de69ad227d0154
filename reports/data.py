"""The experiment's data set: how often labels occur, how many features and labels points have."""

from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from dslide.data import format
from dslide.data.dataset import open_prepared
from dslide.data.stats import Stats
from dslide.errors import UserError
from dslide.experiment_data import data_folder
from dslide.reporting import datasets
from dslide.reporting.race import Race

TITLE = "The data"


@cache
def _stats(folder: Path) -> Stats | None:
    """None where the set isn't prepared: records may have come from another machine."""
    try:
        return Stats.of(open_prepared(folder)) if format.read_meta(folder) is not None else None
    except UserError:
        return None


def figure(race: Race) -> Figure:
    stats = _stats(data_folder(race.spec))
    return Figure() if stats is None else datasets.draw(stats)


def caption(race: Race) -> str:
    stats = _stats(data_folder(race.spec))
    return "The data set isn't prepared on this machine." if stats is None else datasets.caption(stats)
