"""Progress where stderr is no terminal: whole lines, not too many."""

import io

from dslide import progress
from dslide.progress import Progress

EVENT = {"epoch": 1.0, "step": 4, "train_seconds": 2.0, "p1": 0.25, "p3": 0.1, "p5": 0.05}


def test_a_line_every_few_seconds_with_all_that_matters(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress(stream)
    shown.start(40, 0)
    for step in range(1, 21):
        now[0] += 1.0
        shown.update(step, step * 100, step / 10, float(step), 3.25, EVENT)
    shown.stop()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "step 5/40  epoch 0.50  100 samples/s  loss 3.250  P@1 25.00 %"


def test_long_evaluations_tell_how_far_they_are(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress(stream)
    for done in range(0, 1200, 100):
        now[0] += 1.0
        shown.scored(done, 1200)
    shown.evaluated(EVENT)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "scoring 400 of 1,200 points" and len(lines) == 3
    assert "P@1 25.00" in lines[-1]


def test_other_ranks_are_silent():
    shown = Progress(None)
    shown.start(3, 0)
    shown.update(1, 1, 0.1, 1.0, 2.0, {})
    shown.scored(1, 2)
    shown.evaluated(EVENT)
    shown.stop()
