"""The interactive chart of P@1 against seconds: one HTML document that needs nothing from elsewhere."""

from __future__ import annotations

import pandas as pd

from dslide.reporting import look
from dslide.reporting.race import Race


def html(race: Race) -> str | None:
    """The chart's document, None where there is nothing to draw or vl-convert-python is missing."""
    try:
        import altair as alt
        import vl_convert  # noqa: F401  (carries the JavaScript that makes the document self-contained)
    except ImportError:
        return None
    rows = frame(race)
    if rows.empty:
        return None
    colours = look.colours(race)
    labels = {e.label: colours[e.system] for e in race.entries if e.counted}
    pick = alt.selection_point(fields=["system"], bind="legend")
    base = alt.Chart(rows).encode(
        x=alt.X(
            "seconds:Q",
            scale=alt.Scale(type="log", nice=False, padding=12),
            title="training seconds (log)",
            axis=alt.Axis(format="~g", tickCount=6),
        ),
        y=alt.Y("P@1:Q", title="P@1 on the test split"),
        color=alt.Color(
            "system:N",
            scale=alt.Scale(domain=list(labels), range=list(labels.values())),
            legend=alt.Legend(title="click to pick", labelLimit=260, orient="bottom", columns=3),
        ),
        opacity=alt.condition(pick, alt.value(1.0), alt.value(0.08)),
        tooltip=[
            "system:N",
            "cluster:N",
            "kind:N",
            "epoch:Q",
            alt.Tooltip("seconds:Q", format=".4~g"),
            alt.Tooltip("P@1:Q", format=".4f"),
            "seeds:Q",
        ],
    )
    dash = alt.StrokeDash(
        "kind:N",
        scale=alt.Scale(domain=["measured", "composed"], range=[[1, 0], [5, 4]]),
        legend=alt.Legend(title=None, orient="bottom"),
    )
    layers = alt.layer(
        base.mark_line(strokeWidth=2).encode(strokeDash=dash), base.mark_circle(size=45, opacity=1)
    )
    shown = [c.title for c in race.drawn if c.title in set(rows["cluster"])]
    picture = (
        layers.properties(width=max(260, 870 // min(3, len(shown))), height=320)
        .add_params(pick)
        .facet(facet=alt.Facet("cluster:N", sort=shown, title=None), columns=3)
        .configure_view(stroke="#d5d9de")
        .configure_axis(gridColor="#e8ebee")
    )
    return str(picture.to_html(inline=True, embed_options={"actions": False}))


def frame(race: Race) -> pd.DataFrame:
    """One row a system, cluster shape and evaluation after step 0, medians over seeds."""
    parts = []
    for entry in race.entries:
        if entry.counted:
            curve = entry.curve[entry.curve["seconds"] > 0]
            parts.append(
                pd.DataFrame(
                    {
                        "system": entry.label,
                        "cluster": entry.cluster.title,
                        "kind": "composed" if entry.composed else "measured",
                        "epoch": curve["epoch"].round(3),
                        "seconds": curve["seconds"].round(5),
                        "P@1": curve["p1"].round(5),
                        "seeds": len(entry.counted),
                    }
                )
            )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
