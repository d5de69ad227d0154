"""The memory that a conversion takes, which doesn't depend on the file's size.

`python -m dslide.bench.speed.large_file ROWS` converts a generated file of so many points of 20 features.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from dslide.data.convert import convert
from dslide.data.text import Text


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
        begin, cpu = time.perf_counter(), time.process_time()
        with watch:
            convert(Path(temporary) / "out", Text(file), None, name="bench", source="", threads=threads)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        print(f"{rows // block * block:,} rows, {size / 1e6:,.0f} MB of text, {threads} threads")
        print(f"{size / 1e6 / seconds:,.0f} MB/s, {seconds:.1f} s, {cpu:.1f} s of CPU")
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
