"""Protocol, training clock, records: what tables and figures rely on."""

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dslide.bench import clock as clocks
from dslide.bench.clock import TrainClock
from dslide.bench.protocol import eval_steps, samples_at, total_steps
from dslide.bench.records import STATUSES, Recorder, read_run
from dslide.errors import UserError

POINTS = SimpleNamespace(y_indptr=np.array([0, 1, 3, 3, 4]), y_indices=np.array([2, 0, 1, 4], np.int32))
IDS = np.array([[2, 0, 1, 3, 4], [3, 1, 0, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], np.int32)


class Ranks:
    """Threads that play the ranks of a run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meet = threading.Barrier(size, timeout=20)
        self._slots: list[Any] = [None] * size

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._meet.wait()
        everything = list(self._slots)
        self._meet.wait()
        return everything

    def run(self, work: Callable[[Recorder], None], out: Path | None, **options: Any) -> None:
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                work(
                    Recorder(
                        out,
                        rank=rank,
                        size=self.size,
                        barrier=lambda: self._exchange(rank, None) and None,
                        gather=lambda value: self._exchange(rank, value),
                        agree=lambda value: max(self._exchange(rank, value)),
                        **options,
                    )
                )
            except BaseException as error:
                errors.append(error)
                self._meet.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def test_eval_steps_have_both_ends_and_no_repeats() -> None:
    assert eval_steps(1000, 256, 2, [0.25, 0.5, 1, 2, 3]) == [0, 1, 2, 4, 8]
    assert eval_steps(1000, 250, 1.5, [0.25, 1]) == [0, 1, 4, 6]
    assert eval_steps(30, 1, 0.1, []) == [0, 3]  # 0.1 * 30 is a hair above 3
    assert total_steps(7, 3, 0) == 0
    assert total_steps(1000, 256, 6) == 24  # whole epochs: the last batch of each is the shorter one
    assert total_steps(1000, 256, 1.001) == 5
    with pytest.raises(ValueError, match="batch_size"):
        total_steps(10, 0, 1)


def test_samples_count_the_short_last_batch() -> None:
    assert [samples_at(step, 10, 4) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_clock_stands_still_between_stop_and_start() -> None:
    clock = TrainClock()
    with clock:
        assert clock.running
        sum(range(100_000))
    after = clock.seconds
    assert after > 0 and clock.cpu_seconds > 0 and not clock.running
    sum(range(100_000))
    assert clock.seconds == after
    with pytest.raises(RuntimeError, match="does not run"):
        clock.stop()
    clock.start()
    with pytest.raises(RuntimeError, match="already runs"):
        clock.start()


def test_clock_stop_after_an_exception_does_not_wait_for_others() -> None:
    calls: list[int] = []
    clock = TrainClock(barrier=lambda: calls.append(1))
    with pytest.raises(KeyError), clock:
        raise KeyError
    assert len(calls) == 1  # of start


def test_clock_reads_the_interface_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([(100, 10), (150, 25), (1000, 1000), (1001, 1002)])
    monkeypatch.setattr(clocks, "interface_bytes", lambda name: next(counters))
    clock = TrainClock(interface="eth0")
    for _ in range(2):
        with clock:
            pass
    assert (clock.tx_bytes, clock.rx_bytes) == (51, 17)


def test_interface_bytes_of_a_missing_interface_are_zero() -> None:
    assert clocks.interface_bytes("no-such-interface") == (0, 0)
    sent, received = clocks.interface_bytes("lo")
    assert sent >= 0 and received >= 0


def test_record_round_trip(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", context={"system": "x", "cluster": {"nodes": 1}})
    recorder.meta(parameters=np.int64(12))
    recorder.start()
    with recorder.clock:
        pass
    event = recorder.evaluation(3, 12, 0.5, IDS, IDS.astype(np.float16), POINTS)
    recorder.end("done", payload_bytes=5)
    run = read_run(tmp_path / "run")
    assert run.meta["schema_version"] == 1 and run.meta["kind"] == "measured"
    assert run.meta["system"] == "x" and run.meta["parameters"] == 12
    assert run.meta["machine"]["cpu"]["model"] and run.meta["ranks"][0]["affinity"]
    assert run.status == "done" and run.end is not None and run.end["payload_bytes"] == 5
    assert run.end["peak_rss_bytes"] > 1 << 20
    # Labels {2}, {0, 1}, {}, {4}: hits at 1: 1, 0; at 3: 1, 2; at 5: 1, 2, 0, 1.
    assert (event["p1"], event["p3"], event["p5"]) == (1 / 4, 3 / 12, 4 / 20)
    table = run.evals()
    assert list(table.step) == [3] and list(table.p1) == [0.25] and list(table.samples) == [12]
    assert table.train_seconds[0] == recorder.clock.seconds
    np.testing.assert_array_equal(run.predictions(3)["ids"], IDS)
    assert run.predictions(3)["scores"].dtype == np.float16


def test_evaluation_with_a_running_clock_is_refused() -> None:
    recorder = Recorder(None)
    recorder.clock.start()
    with pytest.raises(RuntimeError, match="stop the training clock"):
        recorder.evaluation(0, 0, 0.0, IDS, None, POINTS)


def test_unknown_status_and_second_end_are_refused() -> None:
    recorder = Recorder(None)
    with pytest.raises(ValueError, match="none of"):
        recorder.end("finished")
    assert recorder.end("done")["status"] in STATUSES
    with pytest.raises(RuntimeError, match="ended before"):
        recorder.end("done")


def test_ranks_are_summed_and_agree(tmp_path: Path) -> None:
    returned: dict[int, dict[str, Any]] = {}
    seconds: dict[int, float] = {}

    def work(recorder: Recorder) -> None:
        recorder.meta()
        recorder.start()
        with recorder.clock:
            sum(range(50_000 * recorder.rank))
        seconds[recorder.rank] = recorder.clock.seconds
        ids = IDS if recorder.rank == 0 else None
        returned[recorder.rank] = recorder.evaluation(1, 4, 1.0, ids, None, POINTS)
        recorder.end("target", payload_bytes=10 + recorder.rank, wait_seconds=float(recorder.rank), note="n")

    Ranks(3).run(work, tmp_path / "run")
    assert len(set(seconds.values())) == 1
    assert returned[2]["p1"] == returned[0]["p1"] == 0.25
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end["payload_bytes"] == 33 and end["wait_seconds"] == 2.0 and end["note"] == "n"
    assert [rank["payload_bytes"] for rank in end["ranks"]] == [10, 11, 12]
    assert len(read_run(tmp_path / "run").meta["ranks"]) == 3


def test_several_ranks_need_their_collectives() -> None:
    with pytest.raises(ValueError, match="barrier and gather"):
        Recorder(None, size=2)


def test_pace_counts_only_the_timed_steps() -> None:
    recorder, calls = Recorder(None), []
    recorder.pace(lambda: calls.append(recorder.clock.running), warmup=2, steps=3)
    assert calls == [False, False, True, True, True]
    steps = [e for e in recorder.events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [0, 1, 2]
    assert sum(e["seconds"] for e in steps) == pytest.approx(recorder.clock.seconds)


def test_resume_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = Recorder(out)
    first.meta(seed=1)
    first.start()
    for step in (2, 4):
        with first.clock:
            sum(range(10_000))
        first.evaluation(step, step, step / 4, IDS, None, POINTS)
    first.end("interrupted")
    at_two = read_run(out).of("eval")[0]["train_seconds"]
    again = Recorder(out, resume_step=2)
    assert again.clock.seconds == at_two
    again.meta(seed=2)
    again.start()
    with again.clock:
        sum(range(10_000))
    again.evaluation(4, 4, 1.0, IDS, None, POINTS)
    again.end("done")
    run = read_run(out)
    assert run.meta["seed"] == 1
    assert [e["event"] for e in run.events] == ["start", "eval", "resume", "eval", "end"]
    assert run.status == "done" and run.end is not None and run.end["resumed_from"] == 2
    times = [e["train_seconds"] for e in run.events]
    assert times == sorted(times)


def test_resume_drops_later_predictions(tmp_path: Path) -> None:
    first = Recorder(tmp_path)
    for step in (2, 4):
        first.evaluation(step, step, 0.0, IDS, None, POINTS)
    Recorder(tmp_path, resume_step=3)
    assert [f.name for f in (tmp_path / "predictions").iterdir()] == ["eval-2.npz"]


def test_a_cut_last_line_is_left_out_and_a_broken_one_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.meta()
    recorder.start()
    events = tmp_path / "events.jsonl"
    whole = events.read_text()
    events.write_text(whole + '{"event": "ev')
    run = read_run(tmp_path)
    assert len(run.events) == 1 and run.status == "interrupted" and run.end is None
    events.write_text("nonsense\n" + whole)
    with pytest.raises(UserError, match=r"events\.jsonl:1"):
        read_run(tmp_path)


def test_missing_or_foreign_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"meta\.json"):
        read_run(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(UserError, match="schema_version 99"):
        read_run(tmp_path)


def test_the_base_install_is_enough() -> None:
    code = """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("pandas", "mpi4py", "pyroute2", "snakemake", "tensorflow"):
                    raise ModuleNotFoundError(name, name=name)
        sys.meta_path.insert(0, Absent())
        from dslide.bench import clock, machine, protocol, records, spec, systems
        recorder = records.Recorder(None)
        recorder.meta()
        recorder.start()
        print(recorder.end("done")["status"])
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == "done\n", result.stderr
