"""Data sets: the catalogue, fetching, converting, loading."""

from dslide.data.dataset import Dataset, batches, from_files, load, prepare
from dslide.data.format import Points
from dslide.data.memory import from_scipy, from_text

__all__ = [
    "Dataset",
    "Points",
    "batches",
    "from_files",
    "from_scipy",
    "from_text",
    "load",
    "prepare",
]
