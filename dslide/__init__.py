"""dslide: trains huge sparse networks on a few cheap CPUs with a slow network."""

__version__ = "0.1.0"
