"""A headless browser that shows a page and reports what a script in it has seen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def reported(page: str, probe: str, tmp_path: Path, size: str = "1200,800") -> dict[str, Any]:
    """The JSON that the script `probe`, at the end of `page`, has put into an element called `report`, in a window of
    this size."""
    assert BROWSER is not None
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"<script>{probe}</script></body>"))
    window = (f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000")
    command = [BROWSER, *_FLAGS, *window, "--dump-dom", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r'<pre id="report">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    report: dict[str, Any] = json.loads(text)
    return report
