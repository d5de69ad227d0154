"""Prediction from files and from Python: exactness, streaming, mistakes, interruptions, full disks."""

import gzip
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from mpirun import environment, needs_mpi, run
from scipy.sparse import csr_matrix
from synthetic import make_dataset, make_points, write_prepared, write_xc

import dslide
from dslide import inference
from dslide.data import stream as streaming
from dslide.data.layout import Layout
from dslide.data.stream import stream
from dslide.data.text import Text
from dslide.errors import UserError

PREDICT = ("-m", "dslide", "predict")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder; labels that several ranks share need whole parts, so there are many."""
    folder = tmp_path_factory.mktemp("model")
    data = write_prepared(folder / "set", make_dataset(labels=2500, features=90))
    done = run(1, "-m", "dslide", "train", "--data", data, "--out", folder / "run", "--epochs", "1",
               "--threads", "1", "--set", "network.hidden=24", "--set", "network.bias=true")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def points():
    return make_points(60, 90, 2500, 2)


def reference(model, x):
    """Probabilities [n, labels] by numpy in float64."""
    network = model.networks[0]
    tensors = {name: array.astype(float) for name, array in network.weights().items()}
    a = x @ tensors["input.weights"] + tensors["input.bias"]
    z = np.where(a > 0, a, network.config.network.slope * a) @ tensors["output.weights"].T
    z += tensors["output.bias"]
    return np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))


@pytest.mark.parametrize("k", [1, 5, 2600])
def test_python_gives_numpys_probabilities(k, trained, points):
    model = dslide.load_model(trained, threads=2)
    ids, probabilities = model.predict(points.x, k=k)
    wanted = reference(model, points.x.toarray().astype(float))
    best = -np.sort(-wanted, axis=1)[:, :k]
    assert ids.shape == probabilities.shape == (60, k)
    assert ids.dtype == np.int32 and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities[:, :2500], best, rtol=2e-4)
    found = np.take_along_axis(wanted, ids[:, :2500].astype(np.int64), axis=1)
    np.testing.assert_allclose(found, best, rtol=2e-4)
    assert (ids[:, 2500:] == -1).all() and (probabilities[:, 2500:] == 0).all()
    if k > 2500:
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


def test_python_takes_what_scipy_has(trained, points):
    model = dslide.load_model(str(trained), threads=1)
    ids, probabilities = model.predict(points.x, k=3)
    for other in (
        points.x.tocoo(),
        points.x.toarray(),
        points.x.astype(np.float64),
        points.x[:, :90].tocsc(),
    ):
        again, likely = model.predict(other, k=3)
        assert np.array_equal(again, ids) and np.array_equal(likely, probabilities)
    alone, likely = model.predict(points.x[7:8], k=3)
    assert np.array_equal(alone[0], ids[7]) and np.array_equal(likely[0], probabilities[7])
    empty, nothing = model.predict(csr_matrix((0, 90), dtype=np.float32), k=3)
    assert empty.shape == nothing.shape == (0, 3)


def test_python_names_mistakes(trained, tmp_path):
    model = dslide.load_model(trained, threads=1)
    with pytest.raises(ValueError, match="feature 95 is unknown to the model, which has 90"):
        model.predict(csr_matrix(([1.0], ([0], [95])), shape=(1, 100)))
    with pytest.raises(ValueError, match="finite"):
        model.predict(csr_matrix(([np.nan], ([0], [5])), shape=(1, 90)))
    with pytest.raises(ValueError, match="k 0"):
        model.predict(csr_matrix((1, 90)), k=0)
    with pytest.raises(UserError, match="no trained model"):
        dslide.load_model(tmp_path)


def test_a_server_may_ask_from_several_threads(trained, points):
    model = dslide.load_model(trained, threads=2)
    want = model.predict(points.x, k=4)
    wrong = []

    def ask(rows):
        for _ in range(10):
            ids, probabilities = model.predict(points.x[rows], k=4)
            if not (np.array_equal(ids, want[0][rows]) and np.array_equal(probabilities, want[1][rows])):
                wrong.append(rows)

    askers = [threading.Thread(target=ask, args=(slice(i, i + 9 * i + 1),)) for i in range(5)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not wrong


def predict(trained, source, out, *more, ranks=1, stdin=None):
    command = [sys.executable, *PREDICT, trained, "--input", source, "--out", out, *more]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    return subprocess.run(
        [str(part) for part in command], env=environment(), input=stdin, capture_output=True, timeout=90
    )


@pytest.fixture(scope="module")
def told(trained, points, tmp_path_factory):
    """The file of points, and what one rank of one thread says of it."""
    folder = tmp_path_factory.mktemp("told")
    source = write_xc(folder / "points.txt", points)
    done = predict(trained, source, folder / "out.tsv", "--threads", "1")
    assert done.returncode == 0, done.stderr
    return source, (folder / "out.tsv").read_bytes()


def test_the_files_rows_are_pythons(told, trained, points):
    ids, probabilities = dslide.load_model(trained).predict(points.x, k=5)
    rows = [line.split(b"\t") for line in told[1].splitlines()]
    assert [(int(r), int(p)) for r, p, _, _ in rows] == [(r, p) for r in range(60) for p in range(1, 6)]
    assert [int(label) for *_, label, _ in rows] == ids.ravel().tolist()
    np.testing.assert_allclose([float(p) for *_, p in rows], probabilities.ravel(), rtol=1e-5)


def test_compressed_files_pipes_and_threads_give_the_same_bytes(told, trained, tmp_path):
    source, want = told
    packed = tmp_path / "points.txt.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    done = predict(trained, packed, tmp_path / "out.tsv", "--threads", "3")
    assert done.returncode == 0 and (tmp_path / "out.tsv").read_bytes() == want
    bare = source.read_bytes().partition(b"\n")[2]
    done = predict(trained, "-", "-", "--no-header", "--threads", "2", stdin=bare)
    assert done.returncode == 0 and done.stdout == want, done.stderr
    assert b"standard output: 60 points" in done.stderr


@needs_mpi
def test_ranks_give_the_same_bytes(told, trained, tmp_path):
    done = predict(trained, told[0], tmp_path / "out.tsv", "--threads", "1", ranks=3)
    assert done.returncode == 0 and (tmp_path / "out.tsv").read_bytes() == told[1], done.stderr


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_stream_is_the_file_without_labels(block, threads, points, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", block)
    blocks = list(stream(Text(write_xc(tmp_path / "p.txt", points)), 90, threads=threads))
    assert sum(map(len, blocks)) == 60 and (block > 1000 or len(blocks) > 3)
    assert np.array_equal(np.concatenate([b.x_indices for b in blocks]), points.x_indices)
    assert np.array_equal(np.concatenate([b.x_values for b in blocks]), points.x_values)
    assert np.array_equal(np.concatenate([np.diff(b.x_indptr) for b in blocks]), np.diff(points.x_indptr))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("0 90 5\n", []),
        ("3 90 5\n\n\n\n", [0, 0, 0]),
        ("2 90 5\n1 3:1\n\n\n\n", [1, 0]),
        ("3 90 5\n1 3:1\n\n2 4:1 5:1", [1, 0, 2]),
    ],
)
@pytest.mark.parametrize("block", [2, 1000])
def test_empty_lines_count_if_a_point_follows_or_the_header_says_so(
    text, sizes, block, tmp_path, monkeypatch
):
    monkeypatch.setattr(streaming, "BLOCK", block)
    (tmp_path / "p.txt").write_text(text)
    blocks = list(stream(Text(tmp_path / "p.txt"), 90, threads=2))
    assert np.concatenate([np.diff(b.x_indptr) for b in blocks]).tolist() == sizes


@pytest.mark.parametrize(
    ("text", "layout", "message"),
    [
        ("2 90 5\n1 3:1\n2 4;1\n", Layout(), ":3:3: expected feature:value"),
        (
            "1 99 5\n1 95:1\n",
            Layout(),
            ":2:3: feature '95:1' lies outside 0..89; the model has 90 features, ids from 0",
        ),
        ("1 5 5\n1 7:1\n", Layout(), "lies outside 0..4"),
        ("9 90 5\n1 3:1\n", Layout(), "the header says 9 points, but 1 lines follow"),
        ("1 3:1\n", Layout(), "expected a header"),
        ("1 3:x\n", Layout(header=False, index_base=0), ":1:3: the value of '3:x' isn't a number"),
    ],
)
def test_bad_lines_are_named(text, layout, message, tmp_path):
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(UserError) as error:
        list(stream(Text(tmp_path / "p.txt"), 90, layout=layout, threads=2))
    assert message in str(error.value) and "p.txt" in str(error.value)


def test_a_bad_line_far_down_leaves_no_output(told, trained, tmp_path):
    broken = tmp_path / "broken.txt"
    broken.write_text(told[0].read_text() + "1 2;3\n")
    done = predict(trained, broken, tmp_path / "out.tsv")
    assert done.returncode == 2 and b"broken.txt:62:3" in done.stderr and b"Traceback" not in done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"broken.txt"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--input", "absent.txt", "--out", "o"], "absent.txt: no such file"),
        (["--input", "points.txt", "--out", "."], "a folder"),
        (["--input", "points.txt", "--out", "o", "--candidates", "9"], "--approximate"),
        (["--input", "points.txt", "--out", "o", "--index-base", "2"], "--index-base"),
    ],
)
def test_mistakes_have_status_2(more, message, told, trained):
    done = subprocess.run(
        [sys.executable, *PREDICT, trained, *more],
        env=environment(), cwd=told[0].parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (told[0].parent / "o").exists()


def test_a_full_disk_is_told(told, trained, tmp_path):
    """By a limit on the size of files, and by the device that is always full."""
    command = [sys.executable, *PREDICT, trained, "--input", told[0], "--out", tmp_path / "out.tsv"]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)),
    )  # fmt: skip
    assert done.returncode == 1 and "out.tsv" in done.stderr and "too large" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*map(str, command[:-1]), "-"], env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1 and b"standard output: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


def test_ctrl_c_leaves_nothing_half_written(trained, tmp_path):
    """Interrupted while it waits for more input."""
    out = tmp_path / "out.tsv"
    command = [sys.executable, *PREDICT, trained, "--input", "-", "--out", out]
    with subprocess.Popen(
        list(map(str, command)), env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.stdin.write(b"100000 90 5\n" + b"1 3:1\n" * 50_000)
            process.stdin.flush()
            deadline = time.monotonic() + 60
            while not any(tmp_path.iterdir()):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- approximate


def test_tables_that_propose_everything_give_the_exact_answer(trained, points):
    """One bit a table puts about half of the rows into a bucket; all tables together propose all."""
    exact = dslide.load_model(trained, threads=2).predict(points.x, k=4)
    loose = inference.Tables(K=1, L=40, candidates=2500)
    ids, probabilities = dslide.load_model(trained, threads=2, approximate=loose).predict(points.x, k=4)
    np.testing.assert_allclose(probabilities, exact[1], rtol=1e-3)
    assert (ids == exact[0]).mean() > 0.95  # but for ties that two kernels round differently


@pytest.mark.parametrize("family", ["simhash", "dwta", "wta", "doph"])
def test_recall_grows_with_the_candidates(family, trained, points):
    exact, _ = dslide.load_model(trained, threads=1).predict(points.x, k=5)
    recalls = []
    for candidates in (5, 200, 2500):
        tables = inference.Tables(family, K=4 if family == "simhash" else 1, L=30, candidates=candidates)
        ids, probabilities = dslide.load_model(trained, threads=1, approximate=tables).predict(points.x, k=5)
        assert (probabilities[:, 1:] <= probabilities[:, :-1]).all()
        recalls.append(
            np.mean([len(set(a) & set(b)) / 5 for a, b in zip(ids.tolist(), exact.tolist(), strict=True)])
        )
    assert all(a <= b + 0.02 for a, b in pairwise(recalls)) and recalls[-1] > 0.6


def test_approximate_answers_do_not_depend_on_threads_or_other_points(trained, points):
    answers = []
    for threads in (1, 3):
        model = dslide.load_model(trained, threads=threads, approximate=True)
        answers.append(model.predict(points.x, k=5))
    assert all(np.array_equal(a, b) for a, b in zip(*answers, strict=True))
    alone = model.predict(points.x[9:10], k=5)
    assert np.array_equal(alone[0][0], answers[0][0][9])


def test_no_candidate_at_all_is_no_prediction(trained, points):
    strict = inference.Tables(K=20, L=1, candidates=5)
    ids, probabilities = dslide.load_model(trained, threads=1, approximate=strict).predict(points.x, k=5)
    assert (probabilities[ids < 0] == 0).all() and (ids < 0).any() and np.isfinite(probabilities).all()


def test_tables_follow_the_rule():
    assert inference.Tables().resolved(43_171) == inference.Tables("simhash", 9, 64, 1000)
    assert inference.Tables().resolved(670_091) == inference.Tables("simhash", 13, 64, 13401)
    assert inference.Tables(K=3, candidates=7).resolved(10) == inference.Tables("simhash", 3, 64, 7)
    assert inference.Tables("dwta").resolved(43_171).K == 3


def test_impossible_tables_are_refused(trained):
    with pytest.raises(UserError, match="K = 30"):
        dslide.load_model(trained, approximate=inference.Tables(K=30))
    with pytest.raises(UserError, match="255"):
        dslide.load_model(trained, approximate=inference.Tables(L=300))


def test_approximate_prediction_from_the_command_line(told, trained, tmp_path):
    out = tmp_path / "o"
    done = predict(
        trained, told[0], out, "--approximate", "--hash-k", "1", "--hash-l", "40", "--candidates", "2500"
    )
    assert done.returncode == 0, done.stderr
    same = [a.split(b"\t")[:3] == b.split(b"\t")[:3]
            for a, b in zip(out.read_bytes().splitlines(), told[1].splitlines(), strict=True)]  # fmt: skip
    assert np.mean(same) > 0.95


def test_the_benchmark_of_a_model_measures_its_exact_and_approximate_answers(trained):
    done = run(1, "-m", "dslide", "bench", "inference", "--quick", "--no-rivals", "--threads", "1", "--json",
               "--data", trained.parent / "set", "--model", trained)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 2 * (1 + 4) and all(0 < row["low"] <= row["value"] <= row["high"] for row in rows)
    assert {row["unit"] for row in rows} == {"points/CPU s", "points/s"}
    recall = [float(row["note"].split("recall@5 ")[1][:4]) for row in rows[2:]]
    assert all(0 < part <= 1 for part in recall) and recall[4] >= recall[2]  # more candidates, no fewer found


def test_the_benchmark_of_a_model_wants_points_for_it(trained):
    done = run(1, "-m", "dslide", "bench", "inference", "--model", trained)
    assert done.returncode == 2 and "--data" in done.stderr and "Traceback" not in done.stderr
