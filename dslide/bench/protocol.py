"""When every system of a race is evaluated: the same sample counts for all of them."""

import math
from collections.abc import Iterable

_ROUNDING = 1e-9  # 0.1 * 30 is a hair above 3: a product of decimals must not cost a step


def total_steps(num_points: int, batch_size: int, epochs: float) -> int:
    """Steps of a run: whole epochs of ceil(num_points / batch_size) steps, and the same share of one more."""
    if num_points < 1 or batch_size < 1 or epochs < 0:
        raise ValueError(
            f"num_points {num_points} and batch_size {batch_size} must be >= 1, epochs {epochs} >= 0"
        )
    whole = math.floor(epochs + _ROUNDING)
    part = max(0.0, epochs - whole)
    return whole * math.ceil(num_points / batch_size) + math.ceil(part * num_points / batch_size - _ROUNDING)


def eval_steps(num_points: int, batch_size: int, epochs: float, eval_epochs: Iterable[float]) -> list[int]:
    """Steps after which a system is evaluated: sorted, unique, with step 0 and the last step.

    Args:
        num_points: training points.
        batch_size: global batch size (points a step over all ranks).
        epochs: length of the run.
        eval_epochs: epochs to evaluate at; those beyond `epochs` are left out.
    """
    wanted = [0.0, *(e for e in eval_epochs if 0 <= e <= epochs), epochs]
    return sorted({total_steps(num_points, batch_size, e) for e in wanted})


def samples_at(step: int, num_points: int, batch_size: int) -> int:
    """Training samples seen after `step` steps, when the last batch of every epoch is the shorter one.

    A step never crosses an epoch's border, so an epoch has ceil(num_points / batch_size) steps.
    """
    per_epoch = math.ceil(num_points / batch_size)
    epochs, rest = divmod(step, per_epoch)
    return epochs * num_points + min(rest * batch_size, num_points)
