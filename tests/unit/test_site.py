"""README.md and the site of `make docs`: short, whole, without a link that leads nowhere, and drawn by a browser."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppctl.cli.explain import pages
from ppctl.cli.main import COMMANDS, main
from ppctl.config.keys import text_keys

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--virtual-time-budget=3000")


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 900


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_what_a_page_links_to_exists(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_no_command_of_a_page_has_lost_its_indentation(page: Path) -> None:
    """Markdown would set it as prose, with its remark as a heading's or a sentence's words."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(rf"^ppctl (?:{'|'.join(COMMANDS)}) .*", text, re.MULTILINE) == []


def test_every_guide_is_reached_from_the_readme() -> None:
    reached = set(re.findall(r"\]\(docs/([a-z-]+\.md)\)", README))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= reached


def test_what_the_readme_types_for_shells_are_commands_that_there_are() -> None:
    """Plans and explanations are typed; of what trains or needs a directory only the command's name."""
    typed = re.findall(r"^    ppctl +([^#\n;]+)", README, re.MULTILINE)
    assert len(typed) > 8
    for line in typed:
        words = line.split()
        assert words[0] in COMMANDS
        if words[0] == "explain" or words[:2] == ["plan", "+recipe=deepseek_v3"]:
            assert main(words) == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once; a warning, as of a link that leads nowhere, is an error."""
    if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("mkdocs-material or mkdocstrings is missing (make docs fetches them)")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.whole
def test_the_site_has_every_key_code_and_command(site: Path) -> None:
    keys = "".join(page.read_text() for page in (site / "keys").glob("*.html"))
    assert [name for name in text_keys() if "." in name and f'id="{name}"' not in keys] == []
    errors = "".join(page.read_text() for page in (site / "errors").glob("*.html"))
    assert [code for code in pages() if f'id="{code.lower()}"' not in errors] == []
    commands = (site / "commands.html").read_text()
    assert [name for name in COMMANDS if f"usage: ppctl {name}" not in commands] == []
    assert len(list((site / "decisions").glob("*.html"))) == len(list((ROOT / "docs" / "decisions").glob("*.md")))
    names = (site / "api.html").read_text()
    assert 'id="ppctl.schedule.policies.make_schedule"' in names
    assert not re.search(r'(src|href)="https?://(?!squidfunk|www\.mkdocs)[^"]+\.(css|js|woff2?)', names)


@pytest.mark.whole
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_a_page_no_wider_than_its_window(site: Path, tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    probe = (
        "<script>addEventListener('load', () => { const broken = [...document.images].filter(i => !i.naturalWidth);"
        "document.title = `seen ${document.documentElement.scrollWidth <= innerWidth} ${broken.length} "
        "${document.images.length}`; });</script></body>"
    )
    page = site / f"probe-{width}.html"
    page.write_text((site / "index.html").read_text().replace("</body>", probe))
    command = [
        BROWSER,
        *FLAGS,
        f"--window-size={width},900",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    pictures = README.count("![")
    assert f"<title>seen true 0 {pictures}</title>" in dom, re.findall(r"<title>.*?</title>", dom)
