"""Report files, loaded by path, and what they become: SVG + PNG + sidecar, CSV + HTML.

A file in reports/ is one figure, one table, or one of each under one name. It defines TITLE and

    figure(race) -> matplotlib.figure.Figure     a figure; `look.nothing(reason)` where the records lack it
    caption(race) -> str                         what the figure shows, in sentences (plain text)
    table(race) -> Table                         a table
"""

from __future__ import annotations

import html
import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import pandas as pd

from dslide.bench.machine import git_state
from dslide.errors import UserError
from dslide.files import write_atomic
from dslide.paths import content_root
from dslide.reporting import look
from dslide.reporting.race import Race


@dataclass
class Table:
    """A table twice: `data` for programs (plain numbers, no units in cells), `parts` for people.

    A part is a heading (may be empty) and a frame of texts; `notes` are sentences below.
    """

    data: pd.DataFrame
    parts: list[tuple[str, pd.DataFrame]]
    notes: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return all(frame.empty for _, frame in self.parts)


def names() -> list[str]:
    """The report files that there are."""
    return sorted(path.stem for path in (content_root() / "reports").glob("[!_]*.py"))


def load(name: str) -> ModuleType:
    """Loads reports/<name>.py. UserError if there is no such file."""
    path = content_root() / "reports" / f"{name}.py"
    if not path.is_file():
        raise UserError(f"reports: no file {name}.py; there are {', '.join(names())}")
    spec = importlib.util.spec_from_file_location("dslide_reports." + name.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _part(name: str, function: str) -> ModuleType:
    module = load(name)
    if not hasattr(module, function):
        raise UserError(f"reports/{name}.py has no {function}(race)")
    return module


def revision() -> str:
    """The commit of the project's checkout, "-dirty" behind it where tracked files differ, "unknown"
    without git."""
    state = git_state()
    return "unknown" if not state else state["commit"] + ("-dirty" if state["dirty"] else "")


def write_figure(name: str, race: Race, out: Path, command: Sequence[str] = ()) -> None:
    """Draws reports/<name>.py into `out` (.svg), and beside it a .png and the sidecar .json."""
    module = _part(name, "figure")
    look.style()
    # Ids in the file are hashes salted with the figure's name: stable, and different on a page with
    # several figures.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure = module.figure(race)
        for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix[1:], metadata=metadata)
            write_atomic(out.with_suffix(suffix), buffer.getvalue())
    sidecar = {
        "figure": name,
        "title": module.TITLE,
        "caption": module.caption(race),
        "empty": not figure.axes,
        "experiment": race.spec.name,
        "revision": revision(),
        "command": list(command),
        "inputs": dict(sorted(race.inputs.items())),
    }
    write_atomic(out.with_suffix(".json"), json.dumps(sidecar, indent=1, ensure_ascii=False) + "\n")


def write_table(name: str, race: Race, out: Path) -> None:
    """Writes the table of reports/<name>.py into `out` (.csv), and beside it an .html fragment."""
    table: Table = _part(name, "table").table(race)
    write_atomic(out.with_suffix(".csv"), csv(table))
    write_atomic(out.with_suffix(".html"), fragment(table) + "\n")


def csv(table: Table) -> str:
    """A table's data as CSV text, six significant digits."""
    return table.data.to_csv(index=False, lineterminator="\n", float_format="%.6g")


def fragment(table: Table) -> str:
    """The parts and notes of a table as HTML."""
    if table.empty:
        return '<p class="absent">No records for this table.</p>'
    lines = []
    for heading, frame in table.parts:
        if frame.empty:
            continue
        if heading:
            lines.append(f"<h4>{html.escape(heading)}</h4>")
        lines.append('<div class="wide"><table>')
        lines.append(
            "<thead><tr>"
            + "".join(f"<th>{html.escape(str(c))}</th>" for c in frame.columns)
            + "</tr></thead>"
        )
        lines.append("<tbody>")
        for row in frame.itertuples(index=False, name=None):
            lines.append("<tr>" + _cells([str(value) for value in row]) + "</tr>")
        lines.append("</tbody></table></div>")
    lines += [f'<p class="note">{html.escape(note)}</p>' for note in table.notes]
    return "\n".join(lines)


def _cells(row: list[str]) -> str:
    """Cells of a row; a text with nothing behind it (why a run failed) takes the empty cells' room."""
    filled = max((i for i, text in enumerate(row) if text), default=0)
    empty = len(row) - 1 - filled
    cells = []
    for text in row[: filled + 1] if empty > 1 else row:
        numeric = text.lstrip("<> 1/")[:1].isdigit() or text[:1].isdigit()
        cells.append(f"<td{' class=n' if numeric else ''}>{html.escape(text)}</td>")
    if empty > 1:
        cells[-1] = cells[-1].replace("<td", f"<td colspan={empty + 1}", 1)
    return "".join(cells)
