"""The whole training step in plain numpy and float64: what the fast core is held against.

One dense matrix an equation, nothing skipped, nothing fused; the names are those of the equations:
h = act(x W + b), z = h U' + c - log q (own labels excepted), loss = sum over the batch and a point's labels
of -weight / (labels of the point) * log softmax(z)[label], over the batch's size.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Gradients:
    """Of the mean loss."""

    loss: float
    W: Array
    b: Array
    U: Array
    c: Array


@dataclass
class Reference:
    """W [D, H], b [H], U [L, H], c [L]; `slope` of the activation below zero (0: relu)."""

    W: Array
    b: Array
    U: Array
    c: Array
    slope: float
    weight_labels: bool
    bias: bool = True  # False: b and c stay 0
    log_q: Array | None = None  # [L]
    accumulators: dict[str, Array] = field(default_factory=dict)
    moments: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def names(self) -> str:
        """The parameters that are trained."""
        return "WbUc" if self.bias else "WU"

    def hidden(self, x: Array) -> tuple[Array, Array]:
        """Activations h [B, H] and their derivative."""
        a = x @ self.W + self.b
        return np.where(a > 0, a, self.slope * a), np.where(a > 0, 1.0, self.slope)

    def logits(self, h: Array, y: Array, active: NDArray[np.bool_]) -> Array:
        """z [B, L]; -inf where a row is not active for a point. y [B, L] are zeros and ones."""
        z = h @ self.U.T + self.c
        if self.log_q is not None:
            z = z - np.where(y > 0, 0.0, self.log_q)
        return np.where(active, z, -np.inf)

    def gradients(self, x: Array, y: Array, active: NDArray[np.bool_]) -> Gradients:
        """The loss and its gradients for points x [B, D] with labels y [B, L] and active rows [B, L]."""
        points, own = len(x), y.sum(axis=1, keepdims=True)
        weight = np.sqrt(own) if self.weight_labels else np.ones_like(own)
        target = y / np.maximum(own, 1)  # spread evenly over a point's labels
        h, slope = self.hidden(x)
        z = self.logits(h, y, active)
        lse = np.logaddexp.reduce(z, axis=1, keepdims=True)
        log_p = np.where(active, z - lse, 0.0)
        labelled = own > 0
        loss = -(weight * target * log_p).sum() / points
        p = np.where(active & labelled, np.exp(np.where(active, z - lse, 0.0)), 0.0)
        dz = weight * (p - target) / points
        dh = dz @ self.U
        da = dh * slope
        return Gradients(loss, x.T @ da, da.sum(axis=0), dz.T @ h, dz.sum(axis=0))

    def adagrad(
        self, g: Gradients, lr: float, eps: float, initial: dict[str, float], block: int = 16
    ) -> None:
        """Row-wise Adagrad: one accumulator an output row, and one an input row and block of hidden units."""
        for name in self.names():
            w, grad = np.atleast_2d(getattr(self, name)), np.atleast_2d(getattr(g, name))
            if name == "c":
                w, grad = w.T, grad.T  # a bias is a row of one
            width = block if name in ("W", "b") else w.shape[1]
            out = w.copy()
            for begin in range(0, w.shape[1], width):
                part = grad[:, begin : begin + width]
                key = f"{name}{begin}"
                accumulator = self.accumulators.setdefault(key, np.full((len(w), 1), initial[name]))
                accumulator += (part**2).mean(axis=1, keepdims=True)
                out[:, begin : begin + width] -= lr * part / (np.sqrt(accumulator) + eps)
            setattr(self, name, (out.T if name == "c" else out).reshape(getattr(self, name).shape))

    def adam(
        self, g: Gradients, lr: float, eps: float, step: int, beta1: float = 0.9, beta2: float = 0.999
    ) -> None:
        """Dense Adam (Kingma & Ba 2015), the step size corrected, eps outside."""
        rate = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        for name in self.names():
            grad = getattr(g, name)
            m, v = self.moments.setdefault(name, (np.zeros_like(grad), np.zeros_like(grad)))
            m += (1 - beta1) * (grad - m)
            v += (1 - beta2) * (grad**2 - v)
            setattr(self, name, getattr(self, name) - rate * m / (np.sqrt(v) + eps))


def in_batch_log_q(counts: Array, num_points: int, batch_size: int, extras: int, labels: int) -> Array:
    """log of 1 - (1 - f/N)^(B-1) (1 - 1/L)^S for labels with `counts` f > 0 points."""
    miss = (1 - counts / num_points) ** (batch_size - 1) * (1 - 1 / labels) ** extras
    return np.asarray(np.log(1 - miss))
