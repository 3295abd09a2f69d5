"""The report of a run as one page that needs nothing else: no network, no file beside it.

This file takes a checked document and returns the text of a page. Plotly draws the charts; its script is in the page,
packed. The content security policy of the page forbids it to load anything, and to run anything but that script and
page.js. What was not measured is named.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from plotly.utils import PlotlyJSONEncoder  # type: ignore[import-untyped]

from . import written
from .page.charts import figures, missing, overview
from .page.facts import chips, environment, moment, noise, setting
from .page.figure import Figure, Styles, look, styles_of
from .page.markup import Markup, join, tag
from .page.tables import box, rival_cell, tables
from .schema import Document, dig, points_of, rivals_of, rows_of, violations

INTRO = (
    "Locks on Redis and Valkey, measured side by side. In each round every rival runs once against the same server, "
    "in an order that rotates. Numbers are medians of the rounds, ratios are taken within a round, percentiles are "
    "those of merged histograms. Only ratios mean something on another machine."
)

CHARTS = "The charts are drawn by Plotly, Copyright Plotly, Inc., MIT license."


def page(document: Document) -> str:
    """The whole page. Raises Unreadable for text that is no histogram."""
    styles = styles_of(rivals_of(document))
    style, script, library = _part("page.css"), _part("page.js"), str(get_plotlyjs())
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script, library)),
        tag("title", f"fastlock bench, {_day(document)}"),
        tag("style", Markup(style)),
    ]
    body = [
        tag("header", tag("h1", "What a lock costs"), tag("p", INTRO, class_="lead"), chips(setting(document))),
        tag("div", *alerts(document), class_="boxes"),
        tag("noscript", tag("p", "The charts need JavaScript; all their numbers are in the tables.")),
        contents(document),
        _choice(styles),
        tag("main", *_sections(document, styles)),
        tag(
            "footer", f"Made by fastlock bench from a result of {_day(document)}, schema {document['schema']}. {CHARTS}"
        ),
        _data(look(), id="look"),
        tag("script", Markup(_packed(library)), type="text/plain", id="library"),
        tag("script", Markup(script)),
    ]
    return "<!doctype html>\n" + tag("html", tag("head", *head), "\n", tag("body", *body), lang="en") + "\n"


def _part(name: str) -> str:
    return files(f"{__package__}.page").joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """The content security policy: nothing is loaded, and only these scripts run. Plotly adds rules of style, and saves
    a picture when told to."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(["script-src", *(f"'sha256-{each}'" for each in hashes)])
    more = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; {allowed}; {more}"


def _packed(library: str) -> str:
    """A script, packed to two fifths of its size; the same text makes the same page, so no time is written into it."""
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()


def _data(value: Any, id: str | None = None) -> Markup:
    """JSON for the script of the page, in which no text can end the element."""
    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=id)


def _day(document: Document) -> str:
    return moment(document.get("created")) or "unknown date"


# ----------------------------------------------------------------------------------------------------------- warnings


def alerts(document: Document) -> list[Markup]:
    """Boxes with what a reader has to know before any number: failures first."""
    failures, broken = list(document.get("failures") or []), violations(document)
    held_twice = [f"{scenario}, {rival}: {_times(count)}" for (scenario, rival), count in broken.items() if count]
    boxes = []
    if held_twice:
        boxes.append(_alert("bad", HELD_TWICE, held_twice))
    if failures:
        boxes.append(_alert("bad", "The run failed: do not rely on its numbers", failures))
    boxes += [_alert("warn", title, lines) for title, lines in _warnings(document) if lines is not None]
    if not failures and not held_twice and _measured(document):
        checked = f" In {len(broken)} of them holders were counted: never more than one at a time." if broken else ""
        boxes.append(_alert("good", f"No failures in {_many(_measured(document), 'result')}.{checked}", []))
    if skipped := document.get("skipped"):
        boxes.append(_alert("plain", "Left out", [f"{what}: {why}" for what, why in skipped.items()]))
    return boxes


HELD_TWICE = "A lock was held by more than one at a time"


def _times(count: float) -> str:
    return "once" if count == 1 else f"{written.whole(count)} times"


def _warnings(document: Document) -> Iterable[tuple[str, list[str] | None]]:
    asked = dig(document, "parameters", "scenarios")
    named = [name for name in asked if isinstance(name, str)] if isinstance(asked, list) else []
    lacking = [name for name in named if name not in document["scenarios"]]
    build = dig(document, "environment", "build")
    yield "Interrupted: this is what was measured until then", [] if document.get("interrupted") else None
    yield "Quick run: few and short rounds, a first look only", [] if dig(document, "parameters", "quick") else None
    yield f"A {build} build: its speed means nothing", [] if build not in (None, "release") else None
    yield "Asked for, but not measured", lacking or None
    yield "Nothing was measured", [] if not _measured(document) else None


def _alert(kind: str, title: str, lines: Sequence[str]) -> Markup:
    points = tag("ul", *(tag("li", line) for line in lines)) if lines else None
    return tag("div", tag("h2", title), points, class_=f"box {kind}", role="alert" if kind == "bad" else None)


def _measured(document: Document) -> int:
    return sum(len(rows_of(each)) + len(points_of(each)) for each in document["scenarios"].values())


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# --------------------------------------------------------------------------------------------------------- the sections


def contents(document: Document) -> Markup:
    """The table of contents: links to all sections."""
    links = [_link("overview", "Overview", "all rivals, all scenarios")]
    for at, (name, scenario) in enumerate(document["scenarios"].items()):
        links.append(_link(f"scenario-{at}", name, scenario.get("title") or ""))
    links += [
        _link("noise", "Noise", "how far to trust a difference"),
        _link("environment", "Environment", "and the command"),
    ]
    return tag("nav", tag("ol", *links), aria_label="Contents")


def _link(anchor: str, name: str, about: str) -> Markup:
    return tag("li", tag("a", name, href=f"#{anchor}"), " ", tag("span", about))


def _choice(styles: Styles) -> Markup:
    boxes = [
        tag("label", tag("input", type="checkbox", value=rival, checked=True), rival_cell(rival, styles))
        for rival in styles
    ]
    return tag("details", tag("summary", "Choose rivals to show"), *boxes, class_="rivals", hidden=True)


def _sections(document: Document, styles: Styles) -> Iterable[Markup]:
    yield _overview(document, styles)
    for at, name in enumerate(document["scenarios"]):
        yield section(f"scenario-{at}", name, document, styles)
    yield tag("section", tag("h2", "Noise"), *noise(document), id="noise")
    yield tag("section", tag("h2", "Environment"), *environment(document), id="environment")


def _overview(document: Document, styles: Styles) -> Markup:
    parts: list[Markup] = []
    if drawn := overview(document, styles):
        parts.append(tag("div", card(drawn), class_="grid"))
    parts += _ratios(document, styles)
    parts += _budgets(document)
    if not document["scenarios"]:
        parts.append(tag("p", "No scenario was measured."))
    return tag("section", tag("h2", "Overview"), *parts, id="overview")


def _ratios(document: Document, styles: Styles) -> list[Markup]:
    """A table of the throughput of each rival in each scenario that has rows."""
    found = {name: rows_of(each) for name, each in document["scenarios"].items() if rows_of(each)}
    if not found:
        return []
    body = [[rival_cell(rival, styles), *(_result(rows.get(rival)) for rows in found.values())] for rival in styles]
    headings = [("rival", ""), *((name, dig(document, "scenarios", name, "title") or "") for name in found)]
    caption = f"Per second, and as a multiple of redis-py ({written.ABOUT}: inside the noise)"
    return [box(caption, headings, body)]


def _result(row: Mapping[str, Any] | None) -> Markup | str:
    if row is None or not row.get("rate"):
        return written.NOTHING
    rate = written.rate(row["rate"]["median"])
    ratio = tag("span", f"{written.TIMES} {written.ratio(row)}", class_="soft")
    return join([rate, tag("br"), ratio]) if row.get("ratio") else rate


def _budgets(document: Document) -> list[Markup]:
    verdicts = document.get("budgets") or []
    if not verdicts:
        return []
    body = [
        [
            verdict["name"],
            written.significant(verdict.get("bound")),
            written.significant(verdict.get("measured")),
            "met" if verdict.get("met") else tag("span", "missed", class_="missed"),
        ]
        for verdict in verdicts
    ]
    return [box("Bounds that were checked", [(name, "") for name in ("bound", "value", "measured", "")], body)]


def section(anchor: str, name: str, document: Document, styles: Styles) -> Markup:
    """One scenario: its parameters, the raw round trip beside it, charts, tables, what is missing."""
    scenario, spread = document["scenarios"][name], dig(document, "noise", name, "spread")
    subject = dig(document, "noise", name, "rival") or "the first rival"
    twice = [
        f"{rival}: {_times(count)}" for (where, rival), count in violations(document).items() if count and where == name
    ]
    drawn = figures(scenario, styles)
    parts = [
        tag("div", tag("h2", name), tag("p", scenario.get("title") or "", class_="soft"), class_="title"),
        chips((scenario.get("parameters") or {}).items()),
        tag("p", _round_trip(scenario.get("round_trip")), " ", _noise_of(spread, subject)),
        _alert("bad", HELD_TWICE, twice) if twice else Markup(""),
    ]
    if not rows_of(scenario) and not points_of(scenario):
        parts.append(_alert("warn", "Nothing was measured here.", []))
    elif lacking := missing(scenario, drawn):
        parts.append(tag("p", f"Not measured here: {', '.join(lacking)}."))
    parts.append(tag("div", *map(card, drawn), class_="grid") if drawn else Markup(""))
    return tag("section", *parts, tables(scenario, styles), id=anchor)


def _round_trip(trip: Mapping[str, Any] | None) -> Markup:
    if not trip or trip.get("p50_us") is None:
        return Markup("The raw round trip was not measured beside this scenario.")
    parts = [f"p50 {written.duration(trip['p50_us'])}"]
    if trip.get("p99_us") is not None:
        parts.append(f"p99 {written.duration(trip['p99_us'])}")
    if trip.get("pairs_per_s") is not None:
        parts.append(f"{written.rate(trip['pairs_per_s'])} pairs/s")
    return join(
        [tag("b", "Raw round trip"), f" of a blocking socket, measured between these rounds: {', '.join(parts)}."]
    )


def _noise_of(spread: float | None, rival: str) -> Markup:
    if spread is None:
        return Markup("How noisy the machine was is not known: no ratio is marked.")
    return join([tag("b", "Noise"), f": {rival} against itself came out up to {written.share(spread)} away from 1."])


def card(figure: Figure) -> Markup:
    """A chart with its heading, how to read it, and which rivals are not in it."""
    absent = (
        tag("p", f"Not in this chart, not measured: {', '.join(figure.absent)}.", class_="absent")
        if figure.absent
        else None
    )
    how = tag("p", tag("b", "How to read this. "), figure.how, class_="how")
    chart = figure.chart.to_plotly_json()
    del chart["layout"]["template"]  # all charts share one
    plot = tag("div", _data(chart), class_="plot", role="img", aria_label=f"{figure.title}. {figure.told}")
    return tag("figure", tag("h3", figure.title), plot, how, absent, class_="card")
