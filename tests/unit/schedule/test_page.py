"""The HTML timeline in a real headless browser: it draws, zooms, pans and explains; nothing is fetched."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import BROWSER, reported

from ppctl.cli.timeline import plain
from ppctl.schedule.drawings import perfetto_json, timeline_html
from ppctl.schedule.picture import Picture, RankMemory, StageNote, memory_over_time
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate

PROBE = Path(__file__).with_name("page_probe.js").read_text()


def picture(*measured: RankMemory | None) -> Picture:
    schedule = make_schedule("1f1b", pp=2, num_microbatches=7)
    trace = simulate(schedule, Costs.uniform(2, 1e-3, 2e-3))
    notes = (StageNote(0, 0, 0, "embedding, decoder 0-1", ("1.5 B parameters",)), StageNote(1, 1, 0, "decoder 2, loss"))
    held = (RankMemory(2**30, {0: 2**28}), RankMemory(2**30, {1: 2**27}))
    return Picture("two </script> ranks & more", "uncalibrated", trace, notes, held, measured, limit=2**31)


def test_the_page_stands_alone_and_its_data_cannot_end_its_script() -> None:
    page = timeline_html(picture())
    assert "<title>two &lt;/script&gt; ranks &amp; more</title>" in page
    assert page.count("</script>") == 1
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", page)
    assert "@DATA@" not in page


def worked(drawn: Picture, tmp_path: Path, size: str = "1200,800") -> dict[str, Any]:
    """What the probe saw on the page of a picture, in a window of this size."""
    return reported(timeline_html(drawn), PROBE, tmp_path, size)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
def test_a_browser_draws_zooms_pans_and_explains(tmp_path: Path) -> None:
    report = worked(picture(), tmp_path)

    assert report["errors"] == []
    assert report["fetched"] == 0
    assert report["colours"] > 4  # lane, forward, backward, and their numbers
    assert report["view"] == report["whole"] == [0, 24]
    assert "0F0" in report["block"]
    assert "embedding, decoder 0-1" in report["block"]
    assert "1.5 B parameters" in report["block"]
    assert report["block"].endswith("holds 1.25 GiB then")
    assert "pp_rank 0 is idle" in report["idle"]
    assert "next is 0B0, which needs 1B0 of pp_rank 1" in report["idle"]
    assert (report["scrolls"], report["unzoomed"]) == (True, [0, 24]), "without Ctrl the wheel is the page's"
    assert report["zoomed"][1] - report["zoomed"][0] < 15
    wide = report["panned"][1] - report["panned"][0]
    assert wide == pytest.approx(report["zoomed"][1] - report["zoomed"][0])
    assert report["panned"][0] > report["zoomed"][0]
    assert report["chain"][0] == "0B6"
    assert report["chain"][-1] == "0F0"
    assert report["arrows"] >= 2, "the chain goes to the other rank and comes back"
    assert report["found"] == ["1B3", True]
    assert "0B6" in report["clicked"]
    assert report["shorter"]
    assert "peak memory" in report["map"]
    assert "1.50 GiB" in report["map"]
    assert "measured" not in report["map"] + report["keys"]
    assert report["lines"] == 0


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize("size", ["1280,800", "400,800"])
def test_blocks_are_found_filtered_and_saved_and_all_stays_on_the_screen(size: str, tmp_path: Path) -> None:
    schedule = make_schedule("zbv_zero_bubble", pp=2, vpp=2, num_microbatches=4)
    places = [(s, schedule.placement.rank_of(s), schedule.placement.chunk_of(s)) for s in range(4)]
    notes = tuple(StageNote(*place, f"embedding, decoder {place[0]}-{place[0] + 9}, loss") for place in places)
    held = (RankMemory(2**30, {0: 2**28, 3: 2**28}), RankMemory(2**30, {1: 2**27, 2: 2**27}))
    trace = simulate(schedule, Costs.uniform(4, 1e-3, 2e-3))
    report = worked(Picture("a <V>", "", trace, notes, held, limit=2**31), tmp_path, size)

    assert report["errors"] == []
    assert (report["found"], report["unknown"]) == (None, [None, "there is no such block"]), "its backward is split"
    assert report["ranks"] == [[1], True, 1]
    assert report["refound"] == [0, 1], "what is found is shown, whatever the filter was"
    assert report["dimmed"][0] == 2 and report["dimmed"][1] > 0 and report["dimmed"][2]
    assert report["fillsDiffer"]
    for words in ("input gradient", "weight gradient", "lighter: later chunks of a rank"):
        assert words in report["keys"]
    for words in ("Ctrl and wheel to zoom", "find", "whole step", "Esc"):
        assert words in report["hint"]
    assert report["width"] == [int(size.split(",")[0]), True, True], "nothing sticks out"
    assert report["panel"] == [True, True]
    svg = ElementTree.fromstring(report["svg"])
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"pp_rank 0", "pp_rank 1", "2.00 GiB", "0"} <= set(texts), "rows, and the axis of memory"
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}rect"))) > len(trace.spans)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
def test_a_browser_draws_measured_memory_over_planned(tmp_path: Path) -> None:
    """Rank 0 holds more than planned, most of it for a moment of its backward; rank 1 was not rehearsed."""
    report = worked(picture(RankMemory(2**30, {0: 2**28 + 2**26}, in_backward={0: 2**25}), None), tmp_path)

    assert report["errors"] == []
    assert "holds 1.25 GiB then as planned, 1.31 GiB as measured" in report["block"]
    assert report["lines"] > 0
    assert "memory as planned" in report["keys"]
    assert "memory as measured" in report["keys"]
    assert "a rank's limit, 2.00 GiB" in report["keys"]
    rows = [row.split("\t") for row in report["map"].splitlines() if "\t" in row]
    assert rows[0][-3:] == ["peak, planned", "peak, measured", "difference"]
    assert rows[1][-3:] == ["1.50 GiB", "1.66 GiB", "+10.42 %"]
    assert rows[2][-3:] == ["1.13 GiB", "", ""]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize("name", ["dualpipev", "zbv_zero_bubble"])
def test_a_browser_marks_pairs_where_there_are_any(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, pp=2, vpp=2, num_microbatches=4)
    notes = tuple(StageNote(s, schedule.placement.rank_of(s), schedule.placement.chunk_of(s)) for s in range(4))
    drawn = Picture("", "", simulate(schedule, Costs.uniform(4, 1e-3, 2e-3)), notes)
    report = worked(drawn, tmp_path)
    assert report["errors"] == []
    assert ("a pair" in report["keys"]) == (name == "dualpipev")
    assert report["pairs"] == sorted(f"{ahead} paired with {behind}" for ahead, behind in schedule.pairs)


def beside_plan() -> Picture:
    """A step that took twice as long as planned."""
    drawn = picture()
    slow = tuple(s._replace(start=2 * s.start + 7, end=2 * s.end + 7) for s in drawn.trace.spans)
    return replace(drawn, trace=replace(drawn.trace, spans=slow), planned=drawn.trace)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize("size", ["1280,800", "400,800"])
def test_a_browser_draws_the_planned_step_below_the_measured_one_on_one_axis(size: str, tmp_path: Path) -> None:
    report = worked(beside_plan(), tmp_path, size)
    assert report["errors"] == []
    assert report["view"] == [0, 48], "the longer of the two"
    assert report["found"][0] == "1B3"
    assert report["width"][1:] == [True, True]
    assert "as planned: at" in report["says"]
    assert report["ranks"][0] == [1, 3], "a rank's measured row and its planned one"
    svg = ElementTree.fromstring(report["svg"])
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(words) for words in ("as measured", "as planned", "pp_rank 0")] == [1, 1, 2]


def test_every_form_has_the_plan_below_on_the_scale_of_the_measured_step() -> None:
    drawn = beside_plan()
    text = plain(drawn)
    rows = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert len(rows) == 2
    assert len(rows[0]) == len(rows[1]), "one axis"
    assert rows[1].rstrip("|").endswith("." * (len(rows[1]) // 3))
    events = json.loads(perfetto_json(drawn))["traceEvents"]
    times = {pid: [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (0, 1)}
    assert min(times[0]) == min(times[1])
    assert max(times[1]) < max(times[0])
    assert len({e["id"] for e in events if e["ph"] == "s"}) == sum(e["ph"] == "s" for e in events)


def test_what_is_held_behind_the_last_action_ends_the_levels() -> None:
    drawn = picture()
    levels, _ = memory_over_time(drawn.trace, (RankMemory(100, {0: 10}, behind=400), None))
    assert levels[-1] == (max(span.end for span in drawn.trace.spans), 400)
    assert max(held for _, held in memory_over_time(drawn.trace, (RankMemory(100, {0: 10}), None))[0]) == 120


def test_perfetto_counts_planned_and_measured_memory_apart() -> None:
    events = json.loads(perfetto_json(picture(RankMemory(2**31, {0: 2**28}), None)))["traceEvents"]
    first = {event["name"]: event["args"]["GiB"] for event in reversed(events) if event["ph"] == "C"}
    assert first == {
        "memory of pp_rank 0": 1.25,
        "memory of pp_rank 1": 1.0,
        "measured memory of pp_rank 0": 2.25,
    }


def test_perfetto_draws_an_arrow_for_every_message() -> None:
    events = json.loads(perfetto_json(picture(RankMemory(2**31, {0: 2**28}), None)))["traceEvents"]
    ends = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert ends["s"]
    assert ends["s"].keys() == ends["f"].keys()
    for number, sent in ends["s"].items():
        used = ends["f"][number]
        assert sent["tid"] != used["tid"]
        assert sent["ts"] <= used["ts"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize(("forward", "unit"), [(60e-3, "s"), (3e-3, "ms"), (2e-6, "µs")])
def test_all_labels_of_the_axis_have_one_unit_and_as_many_digits(forward: float, unit: str, tmp_path: Path) -> None:
    trace = simulate(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=8), Costs.uniform(2, forward, 2 * forward))
    report = worked(Picture("1f1b", "", trace, ()), tmp_path)
    svg = ElementTree.fromstring(report["svg"])
    texts = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    labels = [text for text in texts if re.fullmatch(r"[\d.]+ (s|ms|µs)", text)]
    assert len(labels) > 2 and len(set(labels)) == len(labels)
    assert {text.split()[1] for text in labels} == {unit}
    assert len({len(text.split()[0].partition(".")[2]) for text in labels}) == 1
