"""The pages of the site that nobody writes: a hook of mkdocs, which makes them from the sources at every build.

The front page is README.md; keys come from the schema and errors from ppctl/pages/, through the module that `ppctl
explain` prints; commands from their `--help`; names from `ppctl.__all__`. Nothing is written into the checkout.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import ppctl
from ppctl.cli.explain import PAGES, key_facts, keys_of, summary
from ppctl.cli.main import COMMANDS, parser_of
from ppctl.config.keys import keys, sections, value_text
from ppctl.config.metadata import PYTHON

ROOT = Path(__file__).resolve().parents[1]

GUIDES = (
    "install", "first-hour", "configs", "migrating", "planning", "searching", "schedules", "rehearsing", "runs",
    "tracing", "slurm", "kubernetes", "data", "hugging-face", "architectures", "own-modules", "status",
)  # fmt: skip
"""The guides that come first, in this order; all others of docs/ follow by name."""

AT_THE_ROOT = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
MEASURED = {f"benchmarks/{path.name}": path for path in sorted((ROOT / "benchmarks").glob("results-*.md"))}
"""Path of a page of measurements, in the checkout and in the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    docs = Path(config.docs_dir)
    written = sorted(path.stem for path in docs.glob("*.md"))
    guides = [*GUIDES, *(name for name in written if name not in GUIDES)]
    config.nav = [
        {"Start": "index.md"},
        {"Guides": [f"{name}.md" for name in guides]},
        {"Keys": [{name: f"keys/{name}.md"} for name in ("index", *sections())]},
        {"Errors": [{_title(path): f"errors/{path.name}"} for path in sorted(PAGES.glob("E*.md"))]},
        {"Reference": ["commands.md", "api.md"]},
        {"Decisions": [f"decisions/{path.name}" for path in sorted((docs / "decisions").glob("*.md"))]},
        {"Project": list(AT_THE_ROOT.values())},
        {"Measurements": list(MEASURED)},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page of docs/ with its links to other directories of the checkout as they are within the site."""
    up = "../" * page.file.src_uri.count("/")
    for file, name in {**AT_THE_ROOT, **dict(zip(MEASURED, MEASURED, strict=True))}.items():
        markdown = markdown.replace(f"](../{up}{file}", f"]({up}{name}")
    return markdown


def generated() -> Mapping[str, str]:
    """Path of a page within the site -> its Markdown."""
    pages = {"index.md": _of_the_root((ROOT / "README.md").read_text(encoding="utf-8"))}
    pages |= {page: _of_the_root((ROOT / file).read_text(encoding="utf-8")) for file, page in AT_THE_ROOT.items()}
    pages |= {page: _text(path) for page, path in MEASURED.items()}
    pages["keys/index.md"] = _all_sections()
    pages |= {f"keys/{name}.md": _section(name) for name in sections()}
    pages |= {f"errors/{path.name}": _errors(path) for path in PAGES.glob("E*.md")}
    return pages | {"commands.md": _commands(), "api.md": _names()}


def _of_the_root(text: str) -> str:
    """A page of the checkout's root, with its links as they are within docs/."""
    for file, page in AT_THE_ROOT.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text.replace("](docs/", "](")


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _errors(path: Path) -> str:
    """A page of errors; each code is an anchor, as `errors/E1.html#pp-e101`."""
    return re.sub(
        r"^## (PP-E[0-9]{3}) .+$", lambda found: f"{found[0]} {{ #{found[1].lower()} }}", _text(path), flags=re.M
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _all_sections() -> str:
    lines = [f"* [`{name}`]({name}.md): {summary(name)}" for name in sections()]
    top = [f"* `{name}`: {_paragraph(key_facts(key)['text'])}" for name, key in keys().items() if "." not in name]
    head = "# Keys\n\nOn the command line and in recipes, as `train.steps=200`. `ppctl explain KEY` prints the same.\n"
    return "\n".join([head, *lines, "", "Beside the sections:", "", *top]) + "\n"


def _section(name: str) -> str:
    lines = [f"# {name}", "", summary(name), ""]
    for key in keys_of(name):
        lines += _key(key_facts(key))
    return "\n".join(lines)


def _key(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"## {facts['key']} {{ #{facts['key']} }}", "", facts["text"], "")
    if facts["state"] != PYTHON:
        yield f"* type: {facts['type']}; default: `{value_text(facts['default'])}`"
    rows = {
        "limit": facts["limit"] or "",
        "takes": ", ".join(facts["takes"]),
        "alias": f"`{facts['alias']}`" if facts["alias"] else "",
        "Megatron's flag": " ".join(f"`{flag}`" for flag in facts["flags"]),
        "state": ". ".join([facts["meaning"], *facts["notes"]]),
    }
    yield from (f"* {name}: {text}" for name, text in rows.items() if text)
    yield ""
    if "use" in facts:
        yield from ("| schedule | when to take it |", "|---|---|")
        yield from (f"| `{name}` | {use} |" for name, use in facts["use"].items())
        yield ""


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _commands() -> str:
    """Each command's help, as a terminal of 100 columns has it."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    lines = ["# Commands", ""]
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"ppctl.cli.{(command.place or name).partition('.')[0]}")
        lines += [f"## ppctl {name}", "", "```text", parser_of(name, module).format_help().rstrip(), "```", ""]
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before
    return "\n".join(lines)


def _names() -> str:
    """The public names, by the module that has them; mkdocstrings writes their signatures and docstrings."""
    lines = ["# Public names", "", "All of them are importable from `ppctl`.", ""]
    for home, names in ppctl._HOMES.items():
        lines += [f"## {home}", "", *(f"::: {home}.{name}\n" for name in names)]
    return "\n".join(lines)
