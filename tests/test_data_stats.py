"""Statistics of a data set against their definitions, and the figure and command that show them."""

from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dslide.data import Dataset, from_scipy
from dslide.data import format as prepared_format
from dslide.data.cli import app
from dslide.data.stats import TAIL, Stats
from dslide.errors import UserError

matplotlib.use("Agg")


def dataset(train: list[set[int]], test: list[set[int]], labels: int) -> Dataset:
    """A set whose point i has i % 3 features."""

    def parts(rows: list[set[int]]) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.zeros((len(rows), 3)), np.zeros((len(rows), labels))
        for i, row in enumerate(rows):
            x[i, : i % 3] = 1
            y[i, sorted(row)] = 1
        return x, y

    return from_scipy(*parts(train), *parts(test))


rows_of_labels = st.lists(st.sets(st.integers(0, 9), max_size=4), min_size=1, max_size=25)


@settings(deadline=None)
@given(train=rows_of_labels, test=rows_of_labels)
def test_statistics_are_their_definitions(train: list[set[int]], test: list[set[int]]) -> None:
    stats = Stats.of(dataset(train, test, 10))
    counts = Counter(label for row in train for label in row)
    of_test = [label for row in test for label in row]
    assert stats.frequencies.tolist() == sorted((counts[label] for label in range(10)), reverse=True)
    assert stats.never == 10 - len(counts)
    assert stats.rare == sum(count <= TAIL for count in counts.values())
    entries = max(counts.total(), 1)
    assert stats.rare_train == pytest.approx(sum(n for n in counts.values() if n <= TAIL) / entries)
    assert stats.rare_test == pytest.approx(
        sum(0 < counts[i] <= TAIL for i in of_test) / max(len(of_test), 1)
    )
    head = [count for _, count in counts.most_common(stats.head_labels)]
    assert 2 * sum(head) >= counts.total() and 2 * sum(head[:-1]) < max(counts.total(), 1)
    assert stats.top_share == pytest.approx(max(counts.values(), default=0) / entries)
    assert stats.unseen_labels == len(set(of_test) - set(counts))
    assert stats.unseen_share == pytest.approx(sum(i not in counts for i in of_test) / max(len(of_test), 1))
    assert stats.unseen_points == sum(bool(row) and not row & set(counts) for row in test)
    assert stats.train.features.tolist() == [i % 3 for i in range(len(train))]
    ranks, frequencies = stats.curve(5)
    assert len(ranks) <= 5 and (frequencies > 0).all()
    assert not len(ranks) or (ranks[0], ranks[-1]) == (1, 10 - stats.never)


@pytest.mark.parametrize("empty", [False, True])
def test_the_command_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))
    data = dataset([{0, 1}, {0}, set()], [] if empty else [{2}, {0, 2}], 200)
    with prepared_format.writing(tmp_path / "set", name="mine", source="s") as work:
        work.num_features, work.num_labels = data.num_features, data.num_labels
        for split, points in (("train", data.train), ("test", data.test)):
            prepared_format.write_points(work.folder / split, points)
    done = CliRunner().invoke(app, ["stats", str(tmp_path / "set"), "--plot", str(tmp_path / "out.svg")])
    assert done.exit_code == 0, done.exception
    lines = {line[:45].strip(): line[45:].split() for line in done.output.splitlines()}
    assert lines["points"] == ["3", "0" if empty else "2"]
    assert lines["labels with training points"] == ["2", "of", "200"]
    assert lines["labels that hold half of all entries (head)"] == ["1"]
    assert lines["points without labels"] == ["1", "0"]
    assert lines["entries of labels without a training point"] == ["0.0%" if empty else "66.7%"]
    drawn = (tmp_path / "out.svg").read_text()
    assert "labels a point" in drawn and len(drawn) < 200_000
    wrong = CliRunner().invoke(app, ["stats", str(tmp_path / "set"), "--plot", str(tmp_path / "out.txt")])
    assert isinstance(wrong.exception, UserError) and "name a .svg" in str(wrong.exception)
