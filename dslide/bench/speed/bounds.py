"""The most that a machine's measured rates allow a training step: the bound that figures are held against.

A step must read and write every distinct row that it touches once, with the optimiser's state, and do every
multiplication once. With F distinct features and N entries in the batch's inputs, A distinct output rows, B
points, H hidden units, w bytes a weight, s bytes of state a row:

    input   = max(F (2 H w + 2 s) / U,  4 N H / G)
    output  = max(A (2 H w + 2 s) / U,  6 A B H / P)   every point sees every active row; all rows: S for U
            = max(A (2 H w + 2 s) / U,  6 M H / G)     M (row, point) pairs, each point its own rows
    dense   = rows without a gradient that the optimiser moves all the same: (2 H w + 2 s) each / S
    rebuild = L H w / R, a part of B / points between rebuilds

    bound   = B / (input + output + dense + rebuild)

U: random rows read and written, S: the same in order, R: read in order (bytes a second, read and written
bytes each counted); P: dense products, G: weighted sums of rows in the cache (operations a second). Nothing
is counted for choosing rows, indexing, sorting, exponentials, waiting, or reading a row a second time. Within
a part memory and arithmetic overlap perfectly (max). The rates are the best of the same process.
"""

from dataclasses import dataclass

from dslide.bench.speed.rates import Rates

FORMULA = (
    "bound = B / (max(F (2Hw + 2s) / U, 4NH / G) + max(A (2Hw + 2s) / U, 6ABH / P or 6MH / G) "
    "+ dense / S + L H w B / (points between rebuilds R))"
)


@dataclass(frozen=True)
class Work:
    """What one step touches; means over the measured steps.

    batch, hidden: B and H. features: F, distinct features. entries: N, entries of the batch's inputs.
    rows: A, distinct output rows; every_row: they are all that there are. pairs: M where each point has rows
    of its own, else 0.
    weight_bytes: w. input_state, output_state: s of a row in each layer.
    dense_bytes: read and written for rows without a gradient. rebuild_bytes: read for tables, a step's part.
    """

    batch: int
    hidden: int
    features: float
    entries: float
    rows: float
    pairs: float = 0.0
    every_row: bool = False
    weight_bytes: int = 4
    input_state: float = 0.0
    output_state: float = 0.0
    dense_bytes: float = 0.0
    rebuild_bytes: float = 0.0

    @property
    def input_bytes(self) -> float:
        """Of the input layer's rows and their state, read and written."""
        return 2 * self.features * (self.hidden * self.weight_bytes + self.input_state)

    @property
    def output_bytes(self) -> float:
        """Of the output layer's active rows and their state, read and written."""
        return 2 * self.rows * (self.hidden * self.weight_bytes + self.output_state)

    @property
    def input_flops(self) -> float:
        """Forward and the weights' gradient."""
        return 4 * self.entries * self.hidden

    @property
    def output_flops(self) -> float:
        """Logits, the hidden gradient, the weights' gradient."""
        return 6 * (self.pairs or self.rows * self.batch) * self.hidden

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.input_bytes + self.output_bytes + self.dense_bytes + self.rebuild_bytes

    @property
    def flops(self) -> float:
        """All of them."""
        return self.input_flops + self.output_flops

    def seconds(self, rates: Rates) -> float:
        """The least time of a step."""
        output_rate = rates.gather if self.pairs else rates.product
        row_rate = rates.stream_update if self.every_row else rates.random_update
        return 1e-9 * (
            max(self.input_bytes / rates.random_update, self.input_flops / rates.gather)
            + max(self.output_bytes / row_rate, self.output_flops / output_rate)
            + self.dense_bytes / rates.stream_update
            + self.rebuild_bytes / rates.stream_read
        )
