"""Types of the native core: see dslide/cpp/bind_core.cpp and bind_reader.cpp."""

from typing import Any

def __getattr__(name: str) -> Any: ...
