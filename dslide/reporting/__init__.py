"""Tables, figures and the page: pure functions of an experiment's records (see race.py), loaded from
reports/."""

from dslide.reporting.race import Cluster, Entry, Race

__all__ = ["Cluster", "Entry", "Race"]
