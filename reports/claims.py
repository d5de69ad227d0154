"""What the papers claim, with how it is known, beside what this race measured."""

import csv

import pandas as pd

from dslide.paths import content_root
from dslide.reporting import roles
from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import all_targets, number, ratio, reach

TITLE = "Published claims beside ours"

MARKS = {
    "S": "read in the abstract, the published code or an issue",
    "N": "third-party notes quoting the paper",
}


def read_claims() -> list[dict[str, str]]:
    """The rows of reports/claims.csv."""
    with (content_root() / "reports" / "claims.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _entry(race: Race, word: str) -> Entry | None:
    """`<part>@one` or `<part>@slow`: the part's entry on one node, or at the slowest link that it has."""
    part, _, where = word.strip().partition("@")
    entries = [e for e in race.entries if e.counted and roles.role(race, e.system) == part]
    if where == "one":
        return next((e for e in entries if e.cluster.nodes == 1), None)
    several = [e for e in entries if e.cluster.nodes > 1]
    return min(several, key=lambda e: e.cluster.bits, default=None)


def ours(race: Race, rule: str) -> tuple[str, str]:
    """The measured counterpart of a claim, and where it was measured: `a / b` is b's time to target over a's.

    The target is the highest that both reached; else the highest at which a bound can be given.
    """
    if not rule:
        return "", ""
    first, second = (_entry(race, word) for word in rule.split("/"))
    if first is None or second is None or (first.cluster.nodes > 1 and first.cluster != second.cluster):
        return "", "no run"
    found = [
        (t, r)
        for t in sorted(all_targets(race), reverse=True)
        if (r := ratio(reach(second, t), reach(first, t)))
    ]
    if not found:
        return "", "no common target"
    target, value = next((pair for pair in found if not pair[1].sign), found[0])
    return f"{value} times", f"{first.label} over {second.label}, {first.cluster.title}, to P@1 {target:.2f}"


def table(race: Race) -> Table:
    data, rows = [], []
    for claim in read_claims():
        value, where = ours(race, claim["ours"])
        data.append({k: v for k, v in claim.items() if k != "ours"} | {"ours": value, "ours_where": where})
        published = (
            f"{number(float(claim['value'])).removesuffix('.00')} {claim['unit']}" if claim["value"] else ""
        )
        rows.append(
            {
                "paper": claim["paper"],
                "claim": claim["item"],
                "data": claim["data"],
                "hardware": claim["hardware"],
                "published": f"{published} [{claim['mark']}]".strip(),
                "here": value or "–",
                "how": where,
            }
        )
    notes = [
        "–: not measured here.",
        "Published values: " + "; ".join(f"[{mark}] {text}" for mark, text in MARKS.items()) + ". ",
        "Other data, other hardware, other years: the columns stand side by side to show the claim's "
        "kind, not to be divided.",
    ]
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)
