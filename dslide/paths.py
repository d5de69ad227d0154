"""Where content (baselines, data sets, reports, configs) and data live."""

import os
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent


def content_root() -> Path:
    """The folder with baselines/, datasets/, reports/ and config/: the checkout, or the wheel's copy."""
    if (_CHECKOUT / "datasets").is_dir() and (_CHECKOUT / "pyproject.toml").is_file():
        return _CHECKOUT
    return Path(__file__).resolve().parent / "_content"


def data_root() -> Path:
    """The folder of raw/ and prepared/ sets: DSLIDE_DATA, the checkout's data/, or the user's cache."""
    if "DSLIDE_DATA" in os.environ:
        return Path(os.environ["DSLIDE_DATA"]).absolute()
    if content_root() == _CHECKOUT:
        return _CHECKOUT / "data"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dslide"
