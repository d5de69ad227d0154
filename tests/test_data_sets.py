"""The embedded sets, the validation split, the order of batches, and the prepared format's promises."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslide.data import Dataset, Points, bags, batches, load, prepare
from dslide.data import format as prepared_format
from dslide.data.catalogue import catalogue, entry
from dslide.errors import UserError

EMBEDDED = [name for name, row in catalogue().items() if row.embedded]
# What the trainers see must never change by accident, nor from machine to machine.
HASHES = {
    "debian-deps": "cc6895163f7d7357d1de6fbd773a82721615806c5b143e995cce8f3cca87e9fd",
    "wordnet-rel": "32a1fa8c4a690bff6fd1ed8f0d8f9fb4ba33b857c85967a6685257e176298948",
}


@pytest.fixture(scope="module", autouse=True)
def _data_root(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIDE_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def debian(_data_root: None) -> Dataset:
    return load("debian-deps")


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_counts_equal_the_catalogue(name: str) -> None:
    row = entry(name)
    assert row.bags is not None
    content = bags.read(row.bags)
    assert row.expected is not None
    assert row.expected.sizes() == {
        "train": len(content.arrays["train_x_lengths"]),
        "test": len(content.arrays["test_x_lengths"]),
        "features": content.num_features,
        "labels": content.num_labels,
    }
    assert content.names("features") == sorted(set(content.names("features")))
    assert content.names("labels") == sorted(set(content.names("labels")))
    for split in ("train", "test"):
        for axis in "xy":
            assert content.arrays[f"{split}_{axis}_lengths"].min() >= 1
    seen = np.zeros(content.num_labels, bool)
    seen[content.points("train").y_indices] = True
    assert (~seen).sum() <= 1  # a label of wordnet-rel occurs only with points whose words are all unique


@pytest.mark.parametrize("name", EMBEDDED)
def test_prepared_sets_are_the_same_everywhere(name: str) -> None:
    folder = prepare(name)
    meta = prepared_format.verify(folder)
    assert meta["hash"] == HASHES[name]
    expected = entry(name).expected
    assert expected is not None and prepared_format.counts(meta) == expected.sizes()


def test_features_are_tf_idf_rows_of_length_one(debian: Dataset) -> None:
    row = entry("debian-deps")
    assert row.bags is not None
    arrays = bags.read(row.bags).arrays
    first = slice(0, int(arrays["train_x_lengths"][0]))
    ids = np.cumsum(arrays["train_x_gaps"][first].astype(int))
    idf = np.log((1 + arrays["documents"]) / (1 + arrays["document_frequency"][ids].astype(float))) + 1
    expected = (1 + np.log(arrays["train_x_counts"][first].astype(float))) * idf
    np.testing.assert_array_equal(debian.train.x_indices[first], ids)
    np.testing.assert_allclose(debian.train.x_values[first], expected / np.linalg.norm(expected), rtol=1e-6)
    for points in (debian.train, debian.test):
        norms = np.sqrt(points.x.multiply(points.x).sum(axis=1))
        np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_a_point_can_be_read_back(debian: Dataset) -> None:
    features = (prepare("debian-deps") / "features.txt").read_text().split("\n")
    assert debian.label_names is not None
    words = {features[i] for i in debian.train.x_indices[: debian.train.x_indptr[1]]}
    labels = {debian.label_names[i] for i in debian.train.y_indices[: debian.train.y_indptr[1]]}
    assert {"name=0ad", "section=games", "warfare"} <= words
    assert {"0ad-data", "0ad-data-common"} <= labels


def test_views_share_memory(debian: Dataset) -> None:
    assert np.shares_memory(debian.train.x.data, debian.train.x_values)
    assert np.shares_memory(debian.train.x.indices, debian.train.x_indices)
    assert debian.train.x.shape == (len(debian.train), debian.num_features)
    assert debian.train.y.shape == (len(debian.train), debian.num_labels)


@pytest.mark.parametrize("fraction, seed", [(0.1, 0), (0.1, 1), (0.5, 0)])
def test_validation_by_groups(debian: Dataset, fraction: float, seed: int) -> None:
    split = debian.validation(fraction, seed)
    assert split.name == "debian-deps#validation" and split.groups is not None and debian.groups is not None
    # no group in both parts: all of the points of the groups that train kept are in train
    left = np.isin(debian.groups, split.groups).sum()
    assert left == len(split.train) == len(split.groups)
    held = len(debian.train) - len(split.train)
    assert abs(held - fraction * len(debian.train)) < 0.02 * len(debian.train)
    assert set(split.test.y_indices) <= set(split.train.y_indices)
    assert (np.diff(split.test.y_indptr) > 0).all()
    assert (split.num_features, split.num_labels) == (debian.num_features, debian.num_labels)
    assert split.hash == debian.validation(fraction, seed).hash != debian.hash
    assert split.hash != debian.validation(fraction, seed + 1).hash
    np.testing.assert_array_equal(split.train.x_indices, debian.validation(fraction, seed).train.x_indices)


def make(labels: list[list[int]], num_labels: int, groups: list[int] | None = None) -> Dataset:
    """A set whose point i has the feature i alone, and the given labels."""
    size = len(labels)
    points = Points(
        x_indptr=np.arange(size + 1),
        x_indices=np.arange(size, dtype=np.int32),
        x_values=np.ones(size, np.float32),
        y_indptr=np.cumsum([0, *map(len, labels)]),
        y_indices=np.array([label for row in labels for label in row], np.int32),
        num_features=size,
        num_labels=num_labels,
    )
    empty = prepared_format.empty(size, num_labels)
    return Dataset(
        "made",
        "0",
        size,
        num_labels,
        points,
        empty,
        groups=None if groups is None else np.array(groups, np.int32),
    )


@given(st.data())
def test_validation_of_any_set(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    row = st.lists(st.integers(0, 7), max_size=3, unique=True).map(sorted)
    labels = data.draw(st.lists(row, min_size=size, max_size=size))
    groups = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=size, max_size=size))
    whole = make(labels, 8, groups)
    if groups is not None and len(set(groups)) == 1:
        with pytest.raises(UserError, match="too few groups"):
            whole.validation(0.3)
        return
    split = whole.validation(0.3)
    train, test = set(split.train.x_indices.tolist()), set(split.test.x_indices.tolist())
    assert train and not train & test
    if groups is not None:
        assert not {groups[i] for i in train} & {groups[i] for i in test}
    seen = {label for i in train for label in labels[i]}
    for i in set(range(size)) - train:
        kept = [label for label in labels[i] if label in seen]
        if i not in test:  # it has no label that train knows, or its group stayed in train
            assert not kept
    for row_number, i in enumerate(split.test.x_indices):
        begin, end = split.test.y_indptr[row_number : row_number + 2]
        assert (
            split.test.y_indices[begin:end].tolist() == [label for label in labels[i] if label in seen] != []
        )


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_validation_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(UserError, match="fraction"):
        make([[0], [0]], 1).validation(fraction)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 2**64), st.integers(0, 1000))
def test_batches_are_a_permutation(points: int, size: int, seed: int, epoch: int) -> None:
    got = list(batches(points, size, seed, epoch))
    assert sorted(np.concatenate([np.zeros(0, int), *got]).tolist()) == list(range(points))
    assert all(len(batch) == size for batch in got[:-1])
    assert all(batch.dtype == np.int64 for batch in got)


def test_the_batch_order_is_fixed() -> None:
    assert [batch.tolist() for batch in batches(10, 4, 0, 0)] == [[0, 2, 9, 1], [8, 5, 4, 3], [6, 7]]
    orders = {
        np.concatenate(list(batches(100, 7, seed, epoch))).tobytes()
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
    with pytest.raises(UserError, match="batch_size 0"):
        next(batches(10, 0, 0, 0))


def test_a_changed_file_is_noticed(tmp_path: Path, debian: Dataset) -> None:
    folder = tmp_path / "copy"
    with prepared_format.writing(folder, name="copy", source="s") as work:
        work.num_features, work.num_labels = debian.num_features, debian.num_labels
        prepared_format.write_points(work.folder / "train", debian.train.take(np.arange(100)))
        prepared_format.write_points(work.folder / "test", debian.test.take(np.arange(10)))
    assert load(folder).hash == prepared_format.verify(folder)["hash"]
    values = folder / "train" / "x_values.npy"
    content = bytearray(values.read_bytes())
    content[-1] ^= 1
    values.write_bytes(content)
    with pytest.raises(UserError, match=r"train/x_values\.npy: sha256"):
        prepared_format.verify(folder)
    values.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"x_values\.npy"):
        load(folder)
    values.unlink()
    with pytest.raises(UserError, match=r"x_values\.npy: missing"):
        load(folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(UserError, match="format_version 99"):
        load(folder)
    (folder / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta\.json"):
        load(folder)


def test_inconsistent_arrays_never_become_a_set(tmp_path: Path) -> None:
    good = make([[0], [1, 2]], 3).train
    for name, wrong in (
        ("x_indices", [1, 5]),
        ("y_indices", [0, 2, 1]),
        ("y_indptr", [0, 3, 2]),
        ("x_values", [1.0]),
    ):
        with (
            pytest.raises(UserError),
            prepared_format.writing(tmp_path / "set", name="s", source="s") as work,
        ):
            work.num_features, work.num_labels = good.num_features, good.num_labels
            for split in ("train", "test"):
                prepared_format.write_points(work.folder / split, good)
            dtype = getattr(good, name).dtype.type
            prepared_format.write_array(work.folder / "train" / f"{name}.npy", np.array(wrong, dtype))
        assert list(tmp_path.iterdir()) == []


def test_array_files_are_numpys(tmp_path: Path) -> None:
    for values in (np.arange(5, dtype=np.int64), np.zeros(0, np.int32), np.ones(3, np.float32)):
        prepared_format.write_array(tmp_path / "a.npy", values)
        got = np.load(tmp_path / "a.npy")
        assert got.dtype == values.dtype and got.tolist() == values.tolist()
        assert prepared_format.open_array(tmp_path / "a.npy", values.dtype.type).tolist() == values.tolist()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalogue of one's own, with the tiny embedded set "mine"; returns its file of bags."""
    row = {
        "title": "t",
        "bags": "mine.npz",
        "licence": "l",
        "citation": "c",
        "expected": {"train": 3, "test": 3, "features": 2, "labels": 1},
    }
    (tmp_path / "catalogue.yaml").write_text(json.dumps({"mine": row}))
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "catalogue.yaml"))
    documents = [bags.Document(Counter({"a": 1, "b": 2}), frozenset({"x"}))] * 3
    bags.save(bags.build(documents, documents), tmp_path / "mine.npz")
    return tmp_path / "mine.npz"


def test_an_interrupted_preparation_leaves_nothing(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepared_format, "array_hash", interrupt)  # the last step before the rename
        prepare("mine")
    assert [path.name for path in (mine.parent / "data" / "prepared").iterdir()] == [".mine.lock"]
    assert len(load("mine").train) == 3


def test_what_a_killed_process_left_is_removed(mine: Path) -> None:
    prepared = mine.parent / "data" / "prepared"
    (prepared / ".mine.a1b2c3_x" / "train").mkdir(parents=True)
    (prepared / ".mine.too.a1b2c3_x").mkdir()  # another set's
    prepare("mine")
    assert sorted(p.name for p in prepared.iterdir()) == [".mine.lock", ".mine.too.a1b2c3_x", "mine"]


def test_a_place_that_cannot_be_written_is_named(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(mine))  # a file
    with pytest.raises(UserError, match="set DSLIDE_DATA"):
        prepare("mine")


def test_another_embedded_file_is_noticed(mine: Path) -> None:
    first = load("mine")
    assert first.label_names == ["x"] and first.groups is None
    documents = [bags.Document(Counter({"a": 2, "b": 1}), frozenset({"x"}))] * 3
    bags.save(bags.build(documents, documents), mine)
    assert load("mine").hash != first.hash


def test_a_missing_or_broken_embedded_file_is_named(mine: Path) -> None:
    mine.write_bytes(mine.read_bytes()[:100])
    with pytest.raises(UserError, match=r"mine\.npz: not a readable"):
        load("mine")
    mine.unlink()
    with pytest.raises(UserError, match=r"mine\.npz: the embedded data set is missing"):
        load("mine")


def test_what_bags_drop() -> None:
    def document(words: str, labels: str, group: str) -> bags.Document:
        return bags.Document(Counter(words.split()), frozenset(labels.split()), group)

    train = [
        document("b b a", "y x", "s1"),
        document("a once", "x", "s0"),
        document("once-more", "z", "s0"),  # no word of the vocabulary
        document("b", "", "s0"),  # no label, but it counts for the frequencies
    ]
    test = [document("a b new", "y new", "t"), document("a", "new", "t"), document("new", "x", "t")]
    content = bags.build(train, test)
    assert content.names("features") == ["a", "b"] and content.names("labels") == ["x", "y", "z"]
    assert content.arrays["document_frequency"].tolist() == [2, 2] and content.arrays["documents"] == 4
    assert content.arrays["train_groups"].tolist() == [1, 0]
    points = content.points("train")
    assert points.x_indices.tolist() == [0, 1, 0] and points.y_indices.tolist() == [0, 1, 0]
    ratio = points.x_values[1] / points.x_values[0]
    assert ratio == pytest.approx(1 + np.log(2))
    assert content.points("test").y_indices.tolist() == [1]


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(UserError, match=r"catalogue has .*debian-deps"):
        load("debian-dep")
    with pytest.raises(UserError, match=r"no meta\.json"):
        load("some/where")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[]", "mapping"),
        ("a: 1", "mapping"),
        ("a: {title: t}", "a: .*give bags"),
        ("a: {bags: b}", "a.title: Field required"),
        ("a: {title: t, bags: b}", "needs expected"),
        ("a/b: {}", "can't be"),
        ("{", "catalogue.yaml"),
    ],
)
def test_a_broken_catalogue_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "catalogue.yaml").write_text(text)
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "catalogue.yaml"))
    with pytest.raises(UserError, match=reason):
        catalogue()


def test_tokens() -> None:
    assert bags.tokens("The GTK-3.0, C++ (and g++). x") == ["the", "gtk-3.0", "c++", "and", "g++", "x"]
