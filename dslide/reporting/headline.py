"""The sentences that the page opens with, computed from the records: what dslide wins by, and where it
does not win."""

from __future__ import annotations

from dslide.reporting import facts, roles
from dslide.reporting.race import Cluster, Entry, Race
from dslide.reporting.targets import COMPOSED, Ratio, Reach, fastest, number, ratio, reach

_CLOSE = 0.002  # P@1 differences up to this are called equal: the seeds' spread


def entries(race: Race, part: str, cluster: Cluster | None = None) -> list[Entry]:
    """The entries of the first system that plays a part (see roles), on one cluster shape or on all."""
    system = roles.first(race, part)
    return [e for e in race.entries if e.system == system and (cluster is None or e.cluster == cluster)]


def several(race: Race) -> list[Cluster]:
    """Cluster shapes of several nodes, slowest link first."""
    return sorted((c for c in race.drawn if c.nodes > 1), key=lambda c: (c.nodes, c.bits))


def goal(race: Race, part: str) -> float | None:
    """The target to speak of: the highest that the part and every Horovod system with a line reached on
    the slowest
    link; where there is none, the highest that the part reached on any shape."""
    ours = entries(race, part)
    met = [t for t in race.targets if any((r := reach(e, t)) and not r.bound for e in ours)]
    slow = several(race)[:1]
    rivals = [
        e
        for c in slow
        for p in (roles.DENSE_TUNED, roles.HOROVOD_RECIPE)
        for e in entries(race, p, c)
        if e.counted
    ]
    for target in sorted(met, reverse=True):
        if rivals and all((r := reach(e, target)) and not r.bound for e in rivals):
            return target
    return max(met, default=None)


def longer(value: Ratio | None) -> str | None:
    """ "takes 12.3 times as long", with "more than" or "less than" for bounds, "only" where it wins;
    None without."""
    if value is None:
        return None
    lead = {">": "more than ", "<": "less than ", "": "only " if value.value < 1 else ""}[value.sign]
    return f"takes {lead}{number(value.value)}{COMPOSED if value.composed else ''} times as long"


def lead(race: Race) -> list[str]:
    """dslide on several nodes against the Horovod systems at the same link, a sentence a link."""
    target = goal(race, roles.DSLIDE)
    if target is None:
        return ["No run of dslide has reached a target yet."] if race.targets else []
    said = []
    for cluster in several(race):
        for ours in entries(race, roles.DSLIDE, cluster)[:1]:
            found = reach(ours, target)
            if found is not None:
                said.append(_against_horovod(race, ours, target, found))
    alone = [
        s
        for ours in entries(race, roles.DSLIDE)
        if ours.cluster.nodes == 1 and (s := _alone(race, ours, target))
    ]
    return said + alone[:1]


def slide(race: Race) -> list[str]:
    """The papers' algorithm on the slowest and fastest link, against dense Horovod."""
    target = goal(race, roles.SLIDE)
    if target is None:
        return []
    said = []
    for cluster in several(race):
        for ours in entries(race, roles.SLIDE, cluster)[:1]:
            found = reach(ours, target)
            if found is not None:
                said.append(_against_horovod(race, ours, target, found))
    return said


def _against_horovod(race: Race, ours: Entry, target: float, found: Reach) -> str:
    where = ours.cluster.title.split(", ")[-1]
    start = (
        f"On {ours.cluster.nodes} nodes at {where}" if ours.cluster.bandwidth else f"On {ours.cluster.title}"
    )
    time = f"more than {number(found.seconds)}" if found.bound else number(found.seconds)
    text = f"{start}, {ours.label} reaches P@1 {target:.2f} in {time} s"
    if found.bound:
        text = f"{start}, {ours.label} does not reach P@1 {target:.2f} within {number(found.seconds)} s"
    compared = []
    for part, called in (
        (roles.DENSE_PUBLISHED, "dense Horovod as published"),
        (roles.DENSE_TUNED, "dense Horovod tuned"),
    ):
        for rival in entries(race, part, ours.cluster)[:1]:
            says = longer(ratio(reach(rival, target), found))
            compared += [f"{called} {says}"] if says else []
    rivals = roles.having(race, *roles.HOROVOD)
    best = fastest([e for e in race.entries if e.system in rivals and e.cluster == ours.cluster], target)
    named = (roles.first(race, roles.DENSE_PUBLISHED), roles.first(race, roles.DENSE_TUNED))
    if best is not None and best[0].system not in named:
        says = longer(ratio(best[1], found))
        compared += [f"the fastest Horovod variant ({best[0].label}) {says}"] if says else []
    return text + (": " + "; ".join(compared) if compared else "") + "."


def _alone(race: Race, ours: Entry, target: float) -> str | None:
    found = reach(ours, target)
    if found is None or found.bound:
        return None
    compared = []
    for part, called in (
        (roles.TF_RECIPE, "TensorFlow with dslide's own recipe"),
        (roles.TF_FULL, "with its full softmax"),
    ):
        for rival in [e for e in entries(race, part) if e.cluster == ours.cluster][:1]:
            says = longer(ratio(reach(rival, target), found))
            compared += [f"{called} {says}"] if says else []
    tail = ": " + "; ".join(compared) if compared else ""
    return f"On one node, {ours.label} takes {number(found.seconds)} s to P@1 {target:.2f}{tail}."


def losses(race: Race) -> list[str]:
    """Where dslide does not win, every sentence from the records; empty only where it wins everywhere."""
    said: list[str] = []
    for part in (roles.DSLIDE, roles.SLIDE):
        for ours in entries(race, part):
            said += _beaten(race, ours)
    said += _one_node_sooner(race)
    said += _accuracy(race)
    return list(dict.fromkeys(said))


def _family(race: Race, entry: Entry) -> bool:
    return roles.role(race, entry.system) in (roles.DSLIDE, roles.SLIDE)


def _beaten(race: Race, ours: Entry) -> list[str]:
    """Rivals at the same cluster shape that are at a target first: one sentence a rival, for its highest
    such target."""
    said = []
    for rival in race.entries:
        if rival.cluster != ours.cluster or _family(race, rival):
            continue
        won = [t for t in race.targets if _sooner(rival, ours, t)]
        if won:
            theirs, own = reach(rival, won[-1]), reach(ours, won[-1])
            said.append(
                f"{rival.label} is at P@1 {won[-1]:.2f} before {ours.label} on {ours.cluster.title}: "
                f"{theirs} s against "
                f"{own if own else 'no result'}{' s' if own else ''}."
            )
    return said


def _sooner(one: Entry, other: Entry, target: float) -> bool:
    a, b = reach(one, target), reach(other, target)
    return a is not None and b is not None and not a.bound and a.seconds < b.seconds


def _one_node_sooner(race: Race) -> list[str]:
    """dslide on several nodes against the best one-node system, dslide on one node included."""
    said = []
    target = goal(race, roles.DSLIDE)
    one = [e for e in race.entries if e.cluster.nodes == 1]
    for cluster in several(race) if target else []:
        assert target is not None
        for ours in entries(race, roles.DSLIDE, cluster)[:1]:
            best, found = fastest(one, target), reach(ours, target)
            if best is not None and found is not None and best[1].seconds < found.seconds:
                said.append(
                    f"One node is sooner than {cluster.title}: {best[0].label} on {best[0].cluster.shape} "
                    f"is at P@1 "
                    f"{target:.2f} in {best[1]} s, dslide on {cluster.shape} in {found} s."
                )
    return said


def _accuracy(race: Race) -> list[str]:
    """Systems that end above dslide's best."""
    tops = {e: float(e.curve["p1"].iloc[-1]) for e in race.entries if e.counted}
    own = max((v for e, v in tops.items() if e.system == roles.first(race, roles.DSLIDE)), default=None)
    best: dict[str, float] = {}
    for entry, value in tops.items():
        if not _family(race, entry):
            best[entry.label] = max(value, best.get(entry.label, 0.0))
    if own is None:
        return []
    return [
        f"{label} ends at {p:.2%} P@1, dslide at {own:.2%}." for label, p in best.items() if p > own + _CLOSE
    ]


def composed_note(race: Race) -> str | None:
    """What the dagger means, if there is one."""
    if any(e.composed and e.counted for e in race.entries):
        return f"{COMPOSED} composed: a complete unthrottled run's accuracy a step at measured step times."
    return None


def caveats(race: Race) -> list[str]:
    """What the records hold against themselves, then the missing entries."""
    return [*facts.warnings(race), *facts.absent(race)]
