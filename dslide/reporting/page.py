"""The page: one HTML file with everything in it, from the records and the figures that lie beside it."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dslide.files import write_atomic
from dslide.paths import content_root
from dslide.reporting import chart, facts, headline, output
from dslide.reporting.race import Race

# What comes in which order; report files that are not named here follow by name.
FIGURES = ("p1-time", "time-to-target", "second-node", "p1-epochs", "bytes", "data")
TABLES = (
    "time-to-target",
    "accuracy",
    "second-node",
    "bytes",
    "composition",
    "reference",
    "search",
    "claims",
)


def write_page(race: Race, out: Path, command: str) -> None:
    """Writes the page into `out`; figures are read from its folder, a missing one is left out."""
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(content_root() / "reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    ).get_template("page.html.j2")
    interactive = chart.html(race)
    if interactive is None and any(e.counted for e in race.entries):
        print("page: no interactive chart (the package vl-convert-python is not installed)", file=sys.stderr)
    figures = [
        figure for name in _order(race, "figure", FIGURES) if (figure := _figure(race, name, out.parent))
    ]
    tables = [table for name in _order(race, "table", TABLES) if (table := _table(race, name))]
    second = output.load("second-node")
    context = {
        "title": race.spec.title or race.spec.name,
        "race": race,
        "lead": headline.lead(race),
        "slide": headline.slide(race),
        "second": second.sentences(race),
        "losses": headline.losses(race),
        "caveats": headline.caveats(race),
        "composed": headline.composed_note(race),
        "figures": figures,
        "tables": tables,
        "chart": interactive,
        "chart_height": 110 + 380 * -(-len(race.drawn) // 3),
        "context": facts.context(race),
        "command": command,
        "revision": output.revision(),
        "no_latency": facts.NO_LATENCY,
        "inputs": len(race.inputs),
        "experiment": race.experiment.read_text(),
    }
    write_atomic(out, template.render(context))


def _order(race: Race, kind: str, first: tuple[str, ...]) -> list[str]:
    wanted = race.spec.reports
    found = [n for n in output.names() if hasattr(output.load(n), kind) and (wanted is None or n in wanted)]
    return sorted(found, key=lambda name: (first.index(name) if name in first else len(first), name))


def _figure(race: Race, name: str, folder: Path) -> dict[str, Any] | None:
    drawing, sidecar = folder / f"{name}.svg", folder / f"{name}.json"
    if not drawing.is_file():
        return None
    module = output.load(name)
    if sidecar.is_file() and json.loads(sidecar.read_text()).get("empty"):
        return None
    common = " ".join(facts.context(race))
    svg = drawing.read_text()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    points = float(re.search(r'width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
    shown = (
        f'style="width: min(100%, {1.5 * points:.0f}px)"'  # one scale for all: the same letters everywhere
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{module.TITLE}" {shown}', 1)
    return {
        "name": name,
        "title": module.TITLE,
        "svg": Markup(_own_ids(svg, name)),
        "caption": module.caption(race).removesuffix(common).strip(),
    }


def _own_ids(svg: str, name: str) -> str:
    """Ids with the figure's name before them, so that figures on one page do not take each other's glyphs."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)


def _table(race: Race, name: str) -> dict[str, Any] | None:
    module = output.load(name)
    table = module.table(race)
    if table.empty:
        return None
    csv = base64.b64encode(output.csv(table).encode()).decode()
    return {
        "name": name,
        "title": module.TITLE,
        "html": Markup(output.fragment(table)),
        "csv": "" if table.data.empty else f"data:text/csv;base64,{csv}",
    }
