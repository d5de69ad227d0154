"""dslide: trains huge sparse networks on a few cheap CPUs with a slow network."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dslide.data import Dataset, from_files, from_scipy, from_text, load

__all__ = ["Dataset", "__version__", "from_files", "from_scipy", "from_text", "load"]


def __getattr__(name: str) -> Any:
    """Data sets, imported when they are first asked for: the command line starts without them."""
    if name not in __all__:
        raise AttributeError(f"module 'dslide' has no attribute '{name}'")
    from dslide import data

    return getattr(data, name)
