"""How things look, the same in every figure: a colour a system, a marker a cluster shape, dashes for
composed runs."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from dslide.paths import content_root
from dslide.reporting import roles
from dslide.reporting.race import Cluster, Entry, Race

# One hue a family, told apart by lightness within it; distinguishable with the common colour
# blindnesses, since
# markers, dashes and labels carry the difference too.
_SHADES = {
    roles.DSLIDE: ["#0b4f9e", "#2f7fd6", "#123a66", "#5b6fd0", "#00798c", "#3d3d8f"],
    roles.SLIDE: ["#4fb3e8", "#8fd0f2", "#2d8fc4"],
    roles.DENSE_PUBLISHED: ["#7a1f1f"],
    roles.DENSE_TUNED: ["#d1462f", "#b03020"],
    roles.HOROVOD_RECIPE: ["#f0962e", "#d9b310", "#b86e00"],
    roles.TF_FULL: ["#1d7a46", "#0f4d2b"],
    roles.TF_RECIPE: ["#7cc36a", "#a9cf54"],
    roles.TREES: ["#8a4fa3", "#bb8fcc"],
    None: ["#555555", "#888888", "#b05f8f", "#6b6b2f", "#3f7f7f"],
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#667080"


def style() -> None:
    """Takes the style of reports/."""
    import matplotlib.pyplot as plt

    plt.rcdefaults()
    plt.style.use(content_root() / "reports" / "paper.mplstyle")


def colours(race: Race) -> dict[str, str]:
    """A colour for every system of the experiment."""
    used: dict[str | None, int] = {}
    chosen = {}
    for system in race.systems:
        part = roles.role(race, system)
        shades = _SHADES[part]
        chosen[system] = shades[used.get(part, 0) % len(shades)]
        used[part] = used.get(part, 0) + 1
    return chosen


def markers(race: Race) -> dict[str, str]:
    """A marker for every cluster shape with an entry."""
    return {cluster.id: _MARKERS[i % len(_MARKERS)] for i, cluster in enumerate(race.drawn)}


def dashes(entry: Entry) -> Any:
    """Solid for measured, dashed for composed."""
    return (0, (4, 2)) if entry.composed else "solid"


def name(entry: Entry) -> str:
    """The label with "(composed)" where it belongs."""
    return entry.label + (" (composed)" if entry.composed else "")


def panel_title(cluster: Cluster, marks: list[str]) -> str:
    """The cluster's shape with what the records hold against it ("link not faithful", "oversubscribed")."""
    return cluster.shape + "".join(f"\n({mark.split(' for ')[0]})" for mark in marks)


def nothing(reason: str) -> Figure:
    """A figure that only says why there is nothing to see."""
    figure = Figure(figsize=(7, 1.2))
    figure.text(0.5, 0.5, reason, ha="center", va="center", color=GREY)
    return figure
