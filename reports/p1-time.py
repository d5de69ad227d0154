"""P@1 against training seconds, a panel a cluster shape."""

from matplotlib.figure import Figure

from dslide.reporting import curves
from dslide.reporting.race import Race

TITLE = "P@1 against training time"


def figure(race: Race) -> Figure:
    return curves.draw(race, "seconds")


def caption(race: Race) -> str:
    return curves.caption(race, "seconds")
