"""dslide: trains huge sparse networks on a few cheap CPUs with a slow network."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
MOST_THREADS = 1024  # of a process: the limit of the core's Pool

if TYPE_CHECKING:
    from dslide.data import Dataset, from_files, from_scipy, from_text, load
    from dslide.inference import Model, Tables, load_model

_DATA = ("Dataset", "from_files", "from_scipy", "from_text", "load")
_PREDICTION = ("Model", "Tables", "load_model")
__all__ = ["Dataset", "Model", "Tables", "__version__", "from_files", "from_scipy", "from_text", "load"]
__all__ += ["load_model"]


def __getattr__(name: str) -> Any:
    """Data sets and prediction, imported when first asked for: the command line starts without them."""
    if name in _DATA:
        from dslide import data

        return getattr(data, name)
    if name in _PREDICTION:
        from dslide import inference

        return getattr(inference, name)
    raise AttributeError(f"module 'dslide' has no attribute '{name}'")
