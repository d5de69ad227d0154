"""Data sets: the catalogue, fetching, converting, loading."""

from dslide.data.dataset import Dataset, batches, from_files, load, prepare
from dslide.data.format import Points

__all__ = ["Dataset", "Points", "batches", "from_files", "load", "prepare"]
