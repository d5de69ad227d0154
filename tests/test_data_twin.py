"""Generated sets: their sizes and shape, the same bits for any chunks and on every machine, and learnable."""

import json
from pathlib import Path

import numpy as np
import pydantic
import pytest
from typer.testing import CliRunner

from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import build_config
from dslide.data import format as prepared_format
from dslide.data import load, prepare
from dslide.data.catalogue import entry
from dslide.data.cli import app
from dslide.data.progress import Progress
from dslide.data.twin import CHUNK, Generator, Twin, write
from dslide.trainer import train

HASH = "1a3368eeee1159c9cf23077d579d00f37e1037aba96de4f2bf3fc4678a37660c"
SIZES = {"train": 3000, "test": 500, "features": 2000, "labels": 403}


def arrays(part: object) -> list[np.ndarray]:
    return [getattr(part, name) for name in ("x_lengths", "x_indices", "x_values", "y_lengths", "y_indices")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A catalogue with one small twin; returns its name."""
    row = {"title": "t", "twin": {}, "expected": SIZES, "licence": "l", "citation": "c"}
    (tmp_path / "catalogue.yaml").write_text(json.dumps({"small": row}))
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "catalogue.yaml"))
    return "small"


def test_a_row_of_the_catalogue_is_generated_on_first_use(small: str) -> None:
    before = CliRunner().invoke(app, ["list"])
    assert "generated" in before.output
    converted = CliRunner().invoke(app, ["convert", small])
    assert converted.exit_code == 0, converted.exception
    meta = prepared_format.verify(Path(converted.output.strip()))
    assert prepared_format.counts(meta) == SIZES
    # the same bits on every machine: nothing of it comes from a library's own distributions
    assert meta["hash"] == HASH
    assert load(small).hash == meta["hash"] and prepare(small) == entry(small).prepared


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_set_is_the_same_for_any_chunk(tmp_path: Path, chunk: int) -> None:
    generator = Generator(Twin(seed=3), 300, 90)
    files = []
    for name, size in (("whole", CHUNK), ("cut", chunk)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "train", 100, generator, Progress(None), size)
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert files[0] == files[1] and len(files[0]) == 5


def test_points_depend_on_seed_split_and_number_alone() -> None:
    generator = Generator(Twin(), 300, 90)
    whole = generator.points("train", 0, 50)
    again = Generator(Twin(), 300, 90).points("train", 40, 10)
    begin = whole.x_lengths[:40].sum()
    np.testing.assert_array_equal(whole.x_indices[begin:], again.x_indices)
    np.testing.assert_array_equal(whole.x_values[begin:], again.x_values)
    for other in (generator.points("test", 0, 50), Generator(Twin(seed=1), 300, 90).points("train", 0, 50)):
        assert arrays(other)[1].tolist() != whole.x_indices.tolist()


def test_the_shape_is_the_published_sets() -> None:
    """Non-zeros and labels a point as catalogued for Amazon-670K (75.7 and 5.45), power laws in both."""
    row, real = entry("amazon-670k-twin"), entry("Amazon-670K").expected
    assert row.twin is not None and row.expected is not None and real is not None
    assert row.expected.sizes() == real.sizes()
    part = Generator(row.twin, row.expected.features, row.expected.labels).points("train", 0, 4000)
    assert part.x_lengths.mean() == pytest.approx(75.7, rel=0.02)
    assert part.y_lengths.mean() == pytest.approx(5.45, rel=0.02)
    assert part.y_lengths.min() == 1 and part.x_lengths.std() > 10
    norms = np.bincount(np.repeat(np.arange(4000), part.x_lengths), part.x_values.astype(float) ** 2)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    ranks = np.arange(200, 2000)
    for ids in (part.y_indices, part.x_indices):
        often = np.bincount(ids)
        slope = np.polyfit(np.log(ranks), np.log(np.sort(often)[::-1][ranks]), 1)[0]
        assert -1.2 < slope < -0.5
        assert abs(np.corrcoef(np.arange(len(often)), often)[0, 1]) < 0.02  # an id tells nothing


def test_a_network_learns_it(small: str) -> None:
    """What a point's words tell is far more than the most frequent label."""
    data = load(small)
    often = np.bincount(data.train.y_indices, minlength=data.num_labels).argmax()
    guess = (data.test.y_indices == often).sum() / len(data.test)
    config = build_config(
        None, None, {"epochs": 3, "threads": 1, "eval_epochs": [3], "network": {"hidden": 32}}
    )
    result = train(config, data, LocalComm(), Recorder(None), None)
    assert result["p1"] > 5 * guess and result["p1"] > 0.5


@pytest.mark.parametrize("features, labels", [(1, 1), (5, 3), (40, 17), (40, 32)])
def test_odd_sizes(features: int, labels: int) -> None:
    part = Generator(Twin(background=0), features, labels).points("train", 0, 200)
    assert 0 <= part.x_indices.min() <= part.x_indices.max() < features
    assert set(part.y_indices.tolist()) == set(range(labels))
    assert part.y_lengths.max() <= min(labels, 16) and part.y_lengths.sum() == len(part.y_indices)
    for lengths, ids in ((part.x_lengths, part.x_indices), (part.y_lengths, part.y_indices)):
        for row in np.split(ids, np.cumsum(lengths)[:-1]):
            assert (np.diff(row) > 0).all()


def test_settings_that_cannot_be() -> None:
    with pytest.raises(pydantic.ValidationError, match="topic_labels must be at least"):
        Twin(labels_per_point=9)
    with pytest.raises(pydantic.ValidationError, match="extra"):
        Twin(labels=9)  # type: ignore[call-arg]
