"""Data sets: the catalogue, fetching, converting, loading."""

from dslide.data.format import Points
from dslide.data.load import Dataset, batches, from_files, load, prepare

__all__ = ["Dataset", "Points", "batches", "from_files", "load", "prepare"]
