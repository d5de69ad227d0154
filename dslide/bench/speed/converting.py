"""Reading text: the parser, and the whole way from a file to the prepared format, beside what others have."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dslide import _core
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.sizes import Size
from dslide.data import Dataset
from dslide.data.convert import convert, write_xc
from dslide.data.text import Text


def converting(size: Size, threads: int, *, dataset: Dataset, rivals: bool, **_: Any) -> list[Row]:
    """MB of text a second; rivals: napkinXC's and scikit-learn's readers, which leave matrices in memory."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        file, bare = place / "points.txt", place / "points.svm"
        write_xc(file, dataset.train)
        content = file.read_bytes()
        body = content[content.index(b"\n") + 1 :]
        bare.write_bytes(body)
        pool = _core.Pool(threads)
        megabytes = len(content) / 1e6

        def rate(case: str, work: Callable[[], object]) -> Row:
            return measure("convert", case, "MB/s", megabytes, work, seconds=size.seconds)

        def whole() -> None:
            convert(place / "out", Text(file), None, name="bench", source="", threads=threads)

        sizes = dataset.num_features, dataset.num_labels
        rows = [
            rate("parser alone", lambda: _core.parse_xc(pool, body, *sizes)),
            rate("file to prepared set, checked and on disk", whole),
        ]
        others = [rate(case, work) for case, work in _readers(file, bare, sizes[0])] if rivals else []
    best = max(others, key=lambda row: row.value, default=None)
    if best is not None:
        rows = [row.with_(rival=best.value, rival_name=best.case) for row in rows]
    return rows + others


def _readers(file: Path, bare: Path, features: int) -> list[tuple[str, Callable[[], object]]]:
    """The readers that are installed; scikit-learn's fails on the header, so it reads the file without."""
    found: list[tuple[str, Callable[[], object]]] = []
    try:
        from napkinxc.datasets import load_libsvm_file

        found.append(("napkinXC's reader", lambda: load_libsvm_file(str(file), labels_format="csr_matrix")))
    except ImportError:
        pass
    try:
        from sklearn.datasets import load_svmlight_file

        options = {"multilabel": True, "zero_based": True, "n_features": features}
        found.append(("scikit-learn's reader", lambda: load_svmlight_file(str(bare), **options)))
    except ImportError:
        pass
    return found
