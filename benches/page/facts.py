"""Facts without which a number means nothing: machine, versions, command, parameters, noise.

This file shows what the result says, also under names that this version does not know; all else is "not recorded".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .. import written
from ..schema import Document, dig
from .markup import Markup, tag
from .tables import box

NOT_RECORDED = "not recorded"

LABELS = {
    "python": "Python",
    "fastlock": "fastlock",
    "build": "build of the core",
    "commit": "commit",
    "uvloop": "uvloop",
    "kernel": "kernel",
    "cpu_model": "processor",
    "cpus": "CPUs",
    "governor": "CPU governor",
    "load": "load",
}
APART = {"server", "rivals"}

NOISE = (
    "The first rival also runs against itself, interleaved like all others. Their ratio should be 1; how far it strays "
    "tells how far this machine can be trusted. A ratio inside that range is marked "
    f"{written.ABOUT} and is no difference."
)


def setting(document: Document) -> list[tuple[str, Any]]:
    """The few facts that belong at the top."""
    facts = document.get("environment") or {}
    found = [
        ("", moment(document.get("created"))),
        ("fastlock", facts.get("fastlock")),
        ("server", (server(facts.get("server") or {}) or "").partition(",")[0]),
        ("", facts.get("python")),
        ("CPUs", facts.get("cpus")),
        ("rounds", dig(document, "parameters", "rounds")),
        ("seconds each", dig(document, "parameters", "seconds")),
    ]
    return [(name, value) for name, value in found if value not in (None, "")]


def server(facts: Mapping[str, Any]) -> str | None:
    """Kind, version, then how it was run and reached."""
    name = " ".join(shown(facts[key]) for key in ("kind", "version") if facts.get(key))
    rest = [shown(value) for key, value in facts.items() if key not in ("kind", "version") and value]
    return ", ".join(filter(None, [name, *rest])) or None


def moment(created: str | None) -> str:
    """An ISO 8601 time as people write it."""
    return (created or "").replace("T", " ").replace("+00:00", " UTC")


def chips(pairs: Iterable[tuple[str, Any]]) -> Markup | None:
    """Small facts in a row, without those that are null, which did not apply."""
    items = [
        tag("li", tag("span", f"{name.replace('_', ' ')} ") if name else None, tag("b", shown(value)))
        for name, value in pairs
        if value is not None
    ]
    return tag("ul", *items, class_="chips") if items else None


def environment(document: Document) -> list[Markup]:
    """The command, the machine, and the versions of all rivals."""
    facts = document.get("environment") or {}
    known = [(label, facts.get(key)) for key, label in LABELS.items()] + [("server", server(facts.get("server") or {}))]
    other = [(key.replace("_", " "), value) for key, value in facts.items() if key not in LABELS.keys() | APART]
    command = document.get("command") or NOT_RECORDED
    parts = [
        _card("Machine and server", _list([*known, *other])),
        _card("Parameters", _list((key.replace("_", " "), value) for key, value in _parameters(document))),
    ]
    made_by = tag("pre", tag("code", command))
    return [made_by, tag("div", *parts, class_="grid"), *_versions(facts.get("rivals") or {})]


def noise(document: Document) -> list[Markup]:
    """Noise, which a difference has to exceed, by scenario."""
    spreads = {name: dig(document, "noise", name, "spread") for name in document["scenarios"]}
    body = [
        [name, dig(document, "noise", name, "rival") or written.NOTHING, written.share(spread), _range(spread)]
        for name, spread in spreads.items()
    ]
    headings = [
        ("scenario", ""),
        ("rival, against itself", ""),
        ("away from 1 by", ""),
        ("ratios that are no difference", ""),
    ]
    table = [box("How noisy the machine was", headings, body)] if body else []
    return [tag("p", NOISE, class_="lead"), *table]


def shown(value: Any) -> str:
    """A value of any kind in words."""
    if value is None:
        return NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items()) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _parameters(document: Document) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in (document.get("parameters") or {}).items() if value is not None)


def _range(spread: float | None) -> str:
    if spread is None:
        return "not known"
    return f"{written.significant(1 / (1 + spread))} \N{EN DASH} {written.significant(1 + spread)}"


def _versions(rivals: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    if not rivals:
        return []
    body = [[name, shown(libraries)] for name, libraries in rivals.items()]
    return [
        box(
            "Libraries of each rival, as its own process reports them", [("rival", ""), ("versions", "")], body, words=2
        )
    ]


def _card(title: str, content: Markup) -> Markup:
    return tag("div", tag("h3", title), content, class_="card")


def _list(pairs: Iterable[tuple[str, Any]]) -> Markup:
    entries = [each for name, value in pairs for each in (tag("dt", name), tag("dd", shown(value)))]
    return tag("dl", *entries) if entries else tag("p", NOT_RECORDED)
