"""The page of a benchmark run: its markup, its charts, what it says of what is missing, and how a browser shows it.

No speed is measured here: the results come from support/results.py. The browser is Chromium without a window; where it
is not installed its tests are skipped, in CI they fail.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support import browser, results

from fastlock._cli import main as cli
from fastlock.benches import html, written
from fastlock.benches.page import charts, figure, markup, sweeps
from fastlock.benches.schema import checked

VOID = {"meta", "br", "input"}
STYLE = files("fastlock.benches.page").joinpath("page.css").read_text()


# ----------------------------------------------------------------------------------------------------- markup and looks


def test_everything_is_escaped() -> None:
    evil = "<script>\"'&"
    assert markup.tag("p", evil, title=evil) == (
        '<p title="&lt;script&gt;&quot;&#x27;&amp;">&lt;script&gt;&quot;&#x27;&amp;</p>'
    )
    assert markup.tag("p", markup.tag("b", 1), None, hidden=True, id=None, open=False) == "<p hidden><b>1</b></p>"
    assert markup.tag("line", x1=1, data_rival="a", class_="b") == '<line x1="1" data-rival="a" class="b"></line>'


def test_no_two_rivals_look_alike() -> None:
    names = [*results.RIVALS, *(f"rival {number}" for number in range(12))]
    styles = figure.styles_of(names)
    looks = [(style.colour, style.dash, style.symbol) for style in styles.values()]
    assert len(set(looks)) == len(names)
    assert [name for name, style in styles.items() if style.bold] == ["fastlock"]
    assert figure.styles_of(["redis-py"])["redis-py"] == styles["redis-py"]  # the same in every report


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", range(3), ids=["light", "dark", "print"])
def test_colours_contrast_with_their_background(theme: int) -> None:
    blocks = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    ]
    colours = blocks[0] | blocks[theme]
    for number in range(figure.COLOURS):
        assert contrast(colours[f"s{number}"], colours["card"]) >= 3
    for text, ground in (("ink", "page"), ("ink", "card"), ("soft", "page"), ("soft", "card"), ("accent", "card")):
        assert contrast(colours[text], colours[ground]) >= 4.5
    for kind in ("bad", "warn", "good"):
        assert contrast(colours[kind], colours[f"{kind}-card"]) >= 4.5


# ----------------------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    """Checks nesting as it reads; collects ids, links, charts and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.boxes: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute twice in {tag}"
        assert not {"style", "src", "srcset", "action"} & found.keys()
        assert not any(name.startswith("on") for name in found)
        self.tags.append(tag)
        if "id" in found:
            self.ids.append(str(found["id"]))
        if "href" in found:
            self.links.append(str(found["href"]))
        if found.get("class") == "plot":
            title = self.words[-1]  # the heading stands before it
            self.charts.append({"title": title, "role": str(found.get("role")), "label": str(found.get("aria-label"))})
        if "box" in str(found.get("class")).split():
            self.boxes.append(str(found["class"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["div", "script"]:
            self.charts[-1] |= json.loads(data)
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    """A complete result, as a file would give it back."""
    read: dict[str, Any] = json.loads(json.dumps(results.document()))
    return read


@pytest.fixture(scope="module")
def page(good: dict[str, Any]) -> str:
    return html.page(checked(good, "it"))


@pytest.fixture
def result(good: dict[str, Any]) -> dict[str, Any]:
    """A copy to spoil."""
    return copy.deepcopy(good)


CHARTS = {
    "pair": ["Throughput, pairs per second", "Latency by percentile", "Server CPU per pair"],
    "contention": [
        *("Throughput, grants per second", "Wait for the lock, by percentile", "Handover gap, by percentile"),
        *("Fairness, grants of each waiter", "Server CPU per grant"),
    ],
    "crash": [
        *("Throughput, grants per second", "Wait for the lock, by percentile", "Recovery from a crash"),
        "Server CPU per grant",
    ],
    "waiters": [
        *("Throughput against waiters, grants per second", "p99 of the wait against waiters"),
        *("Server CPU per grant against waiters", "Client CPU per grant against waiters"),
    ],
    "load": ["p50 of the wait against offered load", "p99 of the wait against offered load"],
}


def test_every_chart_is_there(page: str, good: dict[str, Any]) -> None:
    expected = ["Throughput of every rival as a multiple of redis-py's"]
    for scenario in good["scenarios"].values():
        expected += CHARTS[scenario["kind"]]
    assert [chart["title"] for chart in Page(page).charts] == expected
    assert page.count("How to read this.") == len(expected)


def test_charts_can_be_read_aloud(page: str) -> None:
    for chart in Page(page).charts:
        assert chart["role"] == "img"
        assert chart["label"].startswith(f"{chart['title']}. ")
        assert "redis-py" in chart["label"]


def test_charts_hold_what_was_measured(page: str, good: dict[str, Any]) -> None:
    read, hot, waiters = Page(page).charts, good["scenarios"]["hot"]["rows"], good["scenarios"]["waiters"]["points"]
    at = [chart["title"] for chart in read].index("Handover gap, by percentile")
    bars = {trace["legendgroup"]: trace for trace in read[at - 2]["data"] if trace["type"] == "bar"}
    assert {rival: bar["x"] for rival, bar in bars.items()} == {
        rival: [pytest.approx(row["rate"]["median"], rel=1e-4)] for rival, row in hot.items()
    }
    for trace in read[at]["data"]:
        assert trace["y"][-1] == pytest.approx(hot[trace["name"]]["handover_us"]["max"] / 1e6, rel=1e-4)
    (rates,) = (chart for chart in read if chart["title"] == "Throughput against waiters, grants per second")
    for trace in rates["data"]:
        ours = [point for point in waiters if point["rival"] == trace["name"]]
        assert trace["x"] == [point["x"] for point in ours]
        assert trace["y"] == pytest.approx([point["row"]["rate"]["median"] for point in ours], rel=1e-4)


def test_page_is_well_formed_and_links_to_itself_only(page: str) -> None:
    read = Page(page)
    assert len(read.ids) == len(set(read.ids))
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids)
    assert all(link.startswith("#") for link in read.links)
    assert 'name="viewport" content="width=device-width' in page
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(read.tags)


def test_page_needs_no_network(page: str) -> None:
    own = re.sub(r'<script type="text/plain" id="library">[^<]+<', "", page)
    assert len(own) < len(page) / 2
    assert not re.search(r"https?:|//[a-z]|url\(|@import", own.replace("redis://", ""))
    assert "default-src 'none'" in unescape(page)


def test_all_numbers_are_in_the_tables(page: str, good: dict[str, Any]) -> None:
    text, hot = Page(page).text, good["scenarios"]["hot"]["rows"]
    for row in hot.values():
        for name in ("wait_us", "handover_us", "release_us"):
            for part in ("p50", "p90", "p99", "p999", "max"):
                assert written.duration(row[name][part]) in text
        assert written.spread(row["rate"], written.rate) in text
        assert f"{row['fairness']['jain']:.3f}" in text
    for point in good["scenarios"]["load"]["points"]:
        assert written.duration(point["row"]["wait_us"]["p99"]) in text


def test_page_shows_how_the_numbers_were_measured(page: str, good: dict[str, Any]) -> None:
    text = Page(page).text
    counted = sum(len(each["rows"]) + len(each["points"]) for each in good["scenarios"].values())
    for words in (
        "fastlock bench --url redis://:***@localhost:6379/0 --html report.html",
        "CPython 3.11.7",
        "valkey 9.1.2, standalone, embedded, unix socket",
        "Some Processor at 2.6 GHz",
        "CPU governor not recorded",
        "Raw round trip of a blocking socket, measured between these rounds: p50 97.0 µs, p99 210 µs, 10,300 pairs/s.",
        "fastlock against itself came out up to 4 % away from 1.",
        written.spread({"low": 0.96, "high": 1.04}),
        "tasks-uvloop: uvloop is not installed",
        "python 3.11.7, pottery 1.2.3",
        "Not in this chart, not measured: pipeline, ceiling.",
        f"No failures in {counted} results.",
        "missed",
    ):
        assert words in text


def test_no_lock_was_held_twice(page: str) -> None:
    assert not [box for box in Page(page).boxes if "bad" in box]


def test_violations_are_shown_first(result: dict[str, Any]) -> None:
    result["scenarios"]["hot"]["rows"]["pottery"]["violations"] = 3
    result["failures"] = ["hot, pottery: more than one holder"]
    read = Page(html.page(checked(result, "it")))
    assert read.boxes[:2] == ["box bad", "box bad"]
    assert read.boxes.count("box bad") == 3  # and once in the scenario of the violation
    assert read.text.index("hot, pottery: 3 times") < read.text.index("Overview")
    assert "hot, pottery: more than one holder" in read.text
    assert "No failures" not in read.text


def test_hostile_text_stays_text(result: dict[str, Any]) -> None:
    evil = "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    hot = result["scenarios"]["hot"]
    result |= {"command": evil, "created": evil, "failures": [evil], "skipped": {evil: evil}}
    result["environment"] |= {"python": evil, evil: evil, "server": {evil: evil}, "rivals": {evil: {evil: evil}}}
    result["parameters"] |= {evil: [evil]}
    result["budgets"] = [{"name": evil}]
    hot |= {
        "title": evil,
        "unit": evil,
        "kind": evil,
        "parameters": {evil: evil},
        "rows": {evil: hot["rows"]["fastlock"]},
    }
    result["scenarios"] = {evil: hot, "waiters": result["scenarios"]["waiters"]}
    result["scenarios"]["waiters"]["points"][0]["rival"] = evil
    text = html.page(checked(result, "it"))
    read = Page(text)
    assert read.tags.count("script") == 3 + len(read.charts)  # those of the page, and the data of each chart
    drawn = [trace for chart in read.charts for trace in chart["data"]]
    shown = json.dumps([[trace.get(key) for key in ("name", "text", "customdata", "hovertemplate")] for trace in drawn])
    assert "&lt;/script&gt;" in shown
    assert "<script" not in shown
    assert "img" not in read.tags
    assert evil in "".join(read.words)


# ------------------------------------------------------------------------------------------------ what was not measured

Spoil = Callable[[dict[str, Any]], Any]


def each_row(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for scenario in result["scenarios"].values():
        yield from scenario["rows"].values()
        yield from (point["row"] for point in scenario["points"])


def keep_only(*keys: str) -> Spoil:
    def spoil(result: dict[str, Any]) -> None:
        for row in each_row(result):
            for key in set(row) - {"rival", *keys}:
                row[key] = None

    return spoil


def without(*keys: str) -> Spoil:
    def spoil(result: dict[str, Any]) -> None:
        for row in each_row(result):
            for key in keys:
                row.pop(key, None)

    return spoil


def emptied(**values: Any) -> Spoil:
    return lambda result: [scenario.update(copy.deepcopy(values)) for scenario in result["scenarios"].values()]


def bare(result: dict[str, Any]) -> None:
    for key in set(result) - {"schema", "scenarios"}:
        del result[key]


def zero(result: dict[str, Any]) -> None:
    for row in each_row(result):
        row |= {"rate": dict.fromkeys(("median", "low", "high"), 0), "server_cpu_us": 0, "ratio": None}
        row["fairness"] = {"jain": 0, "min_over_max": 0, "grants": [0, 0, 0]}


def extreme(result: dict[str, Any]) -> None:
    for at, row in enumerate(each_row(result)):
        value = (5e-324, 1e-9, 1e18)[at % 3]
        row["rate"] = row["ratio"] = dict.fromkeys(("median", "low", "high"), value)
        row |= {"wait_us": {"p50": value, "p99": value}, "server_cpu_us": value, "noisy": True}
        row["fairness"] = {"jain": value, "min_over_max": value, "grants": [value, 0, 1e18]}


GAPS: dict[str, tuple[Spoil, str]] = {
    "histograms": (without("histograms"), "Not measured here: wait by percentile, handover gap."),
    "rates": (without("rate", "ratio"), "Not measured here: throughput."),
    "fairness": (without("fairness"), "Not measured here: fairness."),
    "server CPU": (without("server_cpu_us", "server_cpu_ratio"), "Not measured here: server CPU."),
    "times": (without("wait_us"), "Not measured here: p50 against offered load, p99 against offered load."),
    "rows empty": (keep_only(), "Not measured here: throughput, recovery."),
    "only rates": (keep_only("rate"), "Not measured here: latency by percentile, server CPU."),
    "no rows": (emptied(rows={}, points=[]), "Nothing was measured here."),
    "null rows": (emptied(rows=None, points=None), "Nothing was measured here."),
    "no round trip": (emptied(round_trip=None), "The raw round trip was not measured beside this scenario."),
    "no words": (emptied(title=None, kind=None, unit=None, parameters=None), "grants/s"),
    "unknown kind": (emptied(kind="quite new"), "Throughput, grants per second"),
    "no scenarios": (lambda result: result.update(scenarios={}), "No scenario was measured."),
    "nothing around": (bare, "How noisy the machine was is not known"),
    "environment": (lambda result: result.update(environment={}), "CPU governor not recorded"),
    "interrupted": (
        lambda result: result.update(interrupted=True),
        "Interrupted: this is what was measured until then",
    ),
    "quick": (lambda result: result["parameters"].update(quick=True), "Quick run"),
    "scenario left out": (lambda result: result["scenarios"].pop("hot"), "Asked for, but not measured hot"),
    "no noise": (lambda result: result.update(noise={"pair": None, "hot": {}}), "no ratio is marked"),
    "debug build": (
        lambda result: result["environment"].update(build="debug"),
        "A debug build: its speed means nothing",
    ),
    "zero": (zero, "0 /s"),
    "extreme": (extreme, "1,000,000,000,000,000,000"),
}


@pytest.mark.long
@pytest.mark.parametrize("gap", GAPS)
def test_missing_data_is_named_and_breaks_nothing(gap: str, result: dict[str, Any]) -> None:
    spoil, words = GAPS[gap]
    spoil(result)
    read = Page(html.page(checked(result, "it")))
    assert words in read.text or any(words in chart["label"] for chart in read.charts)
    assert "None" not in read.text
    assert "nan" not in read.text.split()


def test_late_points_are_open(good: dict[str, Any]) -> None:
    assert sweeps.late({"x": 1000, "row": {"rate": {"median": 949}}})
    assert not sweeps.late({"x": 1000, "row": {"rate": {"median": 951}}})
    assert not sweeps.late({"x": 1000, "row": {}})
    styles = figure.styles_of(results.LOCKS)
    for kind, open_ones in (("load", True), ("waiters", False)):
        for drawn in charts.figures(good["scenarios"][kind], styles):
            symbols = [each for trace in drawn.chart.data for each in trace.marker.symbol]
            assert any(each.endswith("-open") for each in symbols) is open_ones


def test_far_round_trip_does_not_press_the_curves_flat(good: dict[str, Any]) -> None:
    rows, styles = good["scenarios"]["pair"]["rows"], figure.styles_of(list(results.RIVALS))
    near = charts.percentiles(rows, "latency", 97.0, styles)
    far = charts.percentiles(rows, "latency", 0.1, styles)
    assert near is not None
    assert far is not None
    assert [shape.label.text for shape in near.chart.layout.shapes] == ["raw round trip"]
    assert far.chart.layout.shapes == ()


# --------------------------------------------------------------------------------------------------------- the browser

needs_browser = pytest.mark.skipif(
    browser.CHROMIUM is None and not os.environ.get("CI"), reason="chromium is not installed: apt-get install chromium"
)
BAD = """<!doctype html><html><head><meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src
'unsafe-inline'; style-src 'unsafe-inline'"><style>body { margin: 0 } .wide { width: 3000px }
.plot { width: 100px }</style></head><body>
<div class="wide">wide</div><img src="https://127.0.0.1:1/x.png">
<div class="plot"><svg width="100" height="50"><text x="80" y="20">is cut off</text><text x="5" y="20">one</text>
<text x="8" y="22">two</text></svg></div><script>console.error("said"); throw new Error("x")</script></body></html>"""


@pytest.fixture(scope="module")
def crowded(good: dict[str, Any]) -> str:
    """Twice as many rivals, with long names, and a thousand waiters."""
    result = copy.deepcopy(good)
    for scenario in result["scenarios"].values():
        rows = dict(scenario["rows"])
        scenario["rows"] |= {f"{name} with a name that is much too long": row for name, row in rows.items()}
    greedy = results.fairness(random.Random(3), 1024, 3.0)
    result["scenarios"]["hot"]["rows"]["pottery"]["fairness"] = greedy
    return html.page(checked(result, "it"))


@pytest.fixture(scope="module")
def light(page: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, browser.Seen]:
    """What a browser shows where light is preferred, wide and as narrow as a phone."""
    pages = {"wide": (page, 1280), "narrow": (page, 360), "bad": (BAD, 360)}
    return browser.look(pages, tmp_path_factory.mktemp("look"), "light", mouse=True)


@pytest.fixture(scope="module")
def crowd(crowded: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, browser.Seen]:
    """What a browser shows of the crowded page."""
    pages = {"wide": (crowded, 1280), "narrow": (crowded, 360)}
    return browser.look(pages, tmp_path_factory.mktemp("look"), "light")


@pytest.fixture(scope="module")
def dark(page: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, browser.Seen]:
    """What a browser shows where dark is preferred."""
    return browser.look({"wide": (page, 1280), "narrow": (page, 360)}, tmp_path_factory.mktemp("look"), "dark")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("window", "width"), [("wide", 1280), ("narrow", 360)])
def test_page_in_a_browser(page: str, window: str, width: int, scheme: str, request: pytest.FixtureRequest) -> None:
    seen = request.getfixturevalue(scheme)[window]
    assert (seen["errors"], seen["width"], seen["dark"]) == ([], width, scheme == "dark")
    assert (brightness(seen["background"]) < brightness(seen["ink"])) is (scheme == "dark")
    assert len(seen["drawings"]) == page.count('class="plot"')
    fits(seen)
    for drawing in seen["drawings"]:
        assert drawing["overlaps"] == [], drawing["name"]
        for colour in drawing["colours"]:
            assert contrast(as_hex(colour), as_hex(seen["card"])) >= 4.5, drawing["name"]


@needs_browser
@pytest.mark.parametrize("window", ["wide", "narrow"])
def test_charts_answer_the_mouse(window: str, light: dict[str, browser.Seen]) -> None:
    seen = light[window]
    assert len(seen["hover"]) == len(seen["drawings"])
    assert all(re.search("[a-z].*[0-9]", words) for words in seen["hover"]), seen["hover"]
    assert (
        sum("fastlock" in words and "redis-py" in words for words in seen["hover"]) > 5
    )  # lines are read side by side
    assert seen["zoom"] == [True, False, True]
    assert seen["toggle"] == ["legendonly", True]
    marked, after, back = seen["hide"]
    assert marked == after > 50
    assert back == 0
    assert seen["shrunk"] == 0


@needs_browser
@pytest.mark.parametrize("window", ["wide", "narrow"])
def test_crowded_page_in_a_browser(window: str, crowd: dict[str, browser.Seen]) -> None:
    assert crowd[window]["errors"] == []
    fits(crowd[window])


@needs_browser
def test_browser_test_finds_planted_faults(light: dict[str, browser.Seen]) -> None:
    seen = light["bad"]
    assert {error.partition(":")[0] for error in seen["errors"]} == {"policy", "console", "error"}
    assert "DIV.wide" in seen["beyond"]
    assert seen["scroll"] > 2000
    (drawing,) = seen["drawings"]
    assert (drawing["cut"], drawing["overlaps"], drawing["shapes"]) == (["is cut off"], ["one / two"], 0)


def fits(seen: browser.Seen) -> None:
    """No chart is cut off, empty or wider than the window."""
    assert (seen["scroll"], seen["beyond"]) == (0, [])
    for drawing in seen["drawings"]:
        assert drawing["width"] > 200, drawing
        assert drawing["height"] > 150, drawing
        assert drawing["shapes"] > 0, drawing
        assert drawing["cut"] == [], drawing["name"]


def as_hex(colour: str) -> str:
    return "#" + "".join(f"{int(each):02x}" for each in re.findall(r"\d+", colour)[:3])


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


# -------------------------------------------------------------------------------------------------- the command line


def bench(*args: object) -> int:
    return cli.main(["bench", *map(str, args)])


def test_render_makes_a_page_of_a_file(good: dict[str, Any], page: str, tmp_path: Path) -> None:
    saved, made = tmp_path / "result.json", tmp_path / "report.html"
    saved.write_text(json.dumps(good))
    made.write_text("an older one")
    assert bench("render", saved, made) == 0
    assert made.read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "result.json"]


def test_render_refuses_unreadable_files(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, made = tmp_path / "result.json", tmp_path / "report.html"
    result["scenarios"]["hot"]["rows"]["pottery"]["histograms"]["wait"] = "AAAA"
    saved.write_text(json.dumps(result))
    assert bench("render", saved, made) == 2
    assert "result.json: a histogram cannot be read (pottery, wait: " in refused(capsys)
    assert not made.exists()


@pytest.mark.parametrize("where", ["no/such/folder/x.html", "."])
def test_page_that_cannot_be_written_is_refused_before_a_run(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (("--html", tmp_path / where), ("render", "any.json", tmp_path / where)):
        with pytest.raises(SystemExit) as stopped:
            bench(*args)
        assert stopped.value.code == 2
        assert "directory" in refused(capsys)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith("fastlock")) == ("", True)
    return str(line)


@pytest.mark.long
def test_run_writes_a_page(measurable: None, tmp_path: Path) -> None:
    made = tmp_path / "report.html"
    assert bench("--scenario", "pair", "--rounds", 2, "--seconds", 0.02, "--html", made) == 0
    assert [chart["title"] for chart in Page(made.read_text()).charts][1:] == CHARTS["pair"]
