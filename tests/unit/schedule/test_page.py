"""The HTML timeline in a real headless browser: it draws, zooms, pans and explains; nothing is fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ppctl.schedule.page import timeline_html
from ppctl.schedule.picture import Picture, RankMemory, StageNote
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1200,800")

PROBE = f"<script>{Path(__file__).with_name('page_probe.js').read_text()}</script>"


def picture() -> Picture:
    schedule = make_schedule("1f1b", pp=2, num_microbatches=7)
    trace = simulate(schedule, Costs.uniform(2, 1e-3, 2e-3))
    notes = (StageNote(0, 0, 0, "embedding, decoder 0-1", ("1.5 B parameters",)), StageNote(1, 1, 0, "decoder 2, loss"))
    held = (RankMemory(2**30, {0: 2**28}), RankMemory(2**30, {1: 2**27}))
    return Picture("two </script> ranks & more", "uncalibrated", trace, notes, held, limit=2**31)


def test_the_page_stands_alone_and_its_data_cannot_end_its_script() -> None:
    page = timeline_html(picture())
    assert "<title>two &lt;/script&gt; ranks &amp; more</title>" in page
    assert page.count("</script>") == 1
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", page)
    assert "@DATA@" not in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
def test_a_browser_draws_zooms_pans_and_explains(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    page.write_text(timeline_html(picture()).replace("</body>", PROBE + "</body>"))
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    dom = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r'<pre id="report">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    report = json.loads(text)

    assert report["errors"] == []
    assert report["fetched"] == 0
    assert report["colours"] > 4  # lane, forward, backward, and their numbers
    assert report["view"] == report["whole"] == [0, 24]
    assert "0F0" in report["block"]
    assert "embedding, decoder 0-1" in report["block"]
    assert "1.5 B parameters" in report["block"]
    assert "holds 1.25 GiB then" in report["block"]
    assert "pp_rank 0 is idle" in report["idle"]
    assert "next is 0B0, which needs 1B0 of pp_rank 1" in report["idle"]
    assert report["zoomed"][1] - report["zoomed"][0] < 15
    wide = report["panned"][1] - report["panned"][0]
    assert wide == pytest.approx(report["zoomed"][1] - report["zoomed"][0])
    assert report["panned"][0] > report["zoomed"][0]
    assert report["chain"][0] == "0B6"
    assert report["chain"][-1] == "0F0"
    assert "0B6" in report["clicked"]
    assert report["shorter"]
    assert "peak memory" in report["map"]
    assert "1.50 GiB" in report["map"]
