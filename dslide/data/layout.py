"""What files a data set is made from, and how they are to be read."""

from dataclasses import dataclass

from dslide.data.text import Text
from dslide.errors import UserError

MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Source:
    """Where a split is.

    `points` is XC text, or, with `labels`, the matrix of the features beside the one of the labels. `rows`
    picks points of it: a text of row numbers from 1, a line a point, of which `column` (from 0) counts.
    """

    points: Text
    labels: Text | None = None
    rows: Text | None = None
    column: int = 0

    def texts(self) -> list[Text]:
        """All files that the split is made from."""
        return [text for text in (self.points, self.labels, self.rows) if text is not None]


@dataclass(frozen=True)
class Layout:
    """How a text is to be read. Without a header, `features` and `labels` may give the sizes."""

    header: bool = True
    index_base: int | None = None
    label_base: int | None = None  # as index_base, unless it is given
    features: int | None = None
    labels: int | None = None
    lenient: bool = False

    def base(self, axis: str) -> int | None:
        """The first id of features ("x") or labels ("y"), None if it isn't given."""
        return self.index_base if axis == "x" or self.label_base is None else self.label_base

    def check(self) -> None:
        """UserError for settings that contradict each other."""
        for option, base in (("index base", self.index_base), ("label base", self.label_base)):
            if base not in (None, 0, 1):
                raise UserError(f"{option} {base}: must be 0 or 1")
        if self.index_base is None and not self.header:
            raise UserError(
                "a file without a header needs an index base: --index-base 0 if ids start at 0, otherwise 1"
            )
        if self.index_base is None and self.lenient:
            raise UserError(
                "--lenient needs an index base: it leaves lines with ids outside of the header's sizes out, "
                "which tell a wrong base; say --index-base 0 or --index-base 1"
            )
        if self.header and (self.features, self.labels) != (None, None):
            raise UserError(
                "the numbers of features and labels come from the header; give them without one only"
            )
        for kind, size in (("features", self.features), ("labels", self.labels)):
            if size is not None and not 0 <= size <= MAX_ID:
                raise UserError(f"number of {kind} {size}: must be in 0..{MAX_ID}")
