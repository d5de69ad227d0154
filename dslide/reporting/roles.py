"""Which system of an experiment plays which part in the sentences: read from its id, plug-in and label.

`dslide` and `slide` are told apart by the preset; "dense" and "recipe" by the words in a rival's id,
plug-in and label,
and dense as published from dense tuned by those words, else by whether it has settings of its own.
"""

from __future__ import annotations

from dslide.reporting.race import Race

DSLIDE, SLIDE = "dslide", "slide"
DENSE_PUBLISHED, DENSE_TUNED, HOROVOD_RECIPE = (
    "horovod-dense-published",
    "horovod-dense-tuned",
    "horovod-recipe",
)
TF_FULL, TF_RECIPE, TREES = "tensorflow-full", "tensorflow-recipe", "trees"
HOROVOD = (DENSE_PUBLISHED, DENSE_TUNED, HOROVOD_RECIPE)


def role(race: Race, system: str) -> str | None:
    """The part that a system plays, None for any other system."""
    spec = race.systems[system]
    plugin = spec.system.lower()
    words = " ".join([system, plugin, spec.label]).lower().replace("_", "-")
    if plugin.startswith("dslide"):
        return SLIDE if spec.settings.get("preset") == "slide" else DSLIDE
    if "horovod" in words:
        if "recipe" in words or "dense" not in words:
            return HOROVOD_RECIPE
        return (
            DENSE_PUBLISHED
            if "published" in words or not ("tuned" in words or spec.settings)
            else DENSE_TUNED
        )
    if "tensorflow" in words or plugin.startswith("tf"):
        return TF_RECIPE if "recipe" in words else TF_FULL
    if "plt" in words or "napkin" in words:
        return TREES
    return None


def having(race: Race, *parts: str) -> list[str]:
    """The systems that play one of the parts, in the experiment's order."""
    return [system for system in race.systems if role(race, system) in parts]


def first(race: Race, part: str) -> str | None:
    """The first system that plays a part, None if there is none."""
    return next(iter(having(race, part)), None)
