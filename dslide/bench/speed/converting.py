"""Reading text: the parser, and the whole way from a file to the prepared format, beside what others have.

`python -m dslide.bench.speed.converting ROWS` converts a generated file of so many rows and says how much
memory that took: the place to see that it doesn't depend on the file's size.
"""

import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dslide import _core
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.sizes import Size
from dslide.data import Dataset
from dslide.data.convert import convert, write_xc
from dslide.data.text import Text


def converting(
    size: Size, threads: int, *, dataset: Dataset, source: str | None, sets: dict[str, Any], rivals: bool
) -> list[Row]:
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


def main(rows: int) -> None:
    """Converts `rows` generated points of 20 features and prints the rate and the memory."""
    threads, features, labels, block = len(os.sched_getaffinity(0)), 100_000, 50_000, 50_000
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "points.txt"
        ids = np.sort(random.integers(0, features, (block, 20)), axis=1).tolist()
        values = [f"{value:.5f}" for value in random.random(20)]
        lines = "".join(
            f"{i % labels} {' '.join(f'{j}:{v}' for j, v in zip(row, values, strict=True))}\n"
            for i, row in enumerate(ids)
        ).encode()
        with file.open("wb") as out:
            out.write(f"{rows // block * block} {features} {labels}\n".encode())
            for _ in range(rows // block):
                out.write(lines)
        size, watch = file.stat().st_size, _Memory()
        begin = time.perf_counter()
        with watch:
            convert(Path(temporary) / "out", Text(file), None, name="bench", source="", threads=threads)
        seconds = time.perf_counter() - begin
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        print(f"{rows // block * block:,} rows, {size / 1e6:,.0f} MB of text, {threads} threads")
        print(
            f"{size / 1e6 / seconds:,.0f} MB/s, {seconds:.1f} s, {cpu.ru_utime + cpu.ru_stime:.1f} s of CPU"
        )
        print(f"memory: {watch.before:,} MB before, {watch.most:,} MB at most (mapped files aside)")


class _Memory:
    """The process's own memory (RssAnon) in MB, at first and at most, looked at every 20 ms."""

    def __enter__(self) -> "_Memory":
        self.before = self.most = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
