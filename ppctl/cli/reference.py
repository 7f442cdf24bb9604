"""Error codes, keys and sections as data: the one source of `ppctl explain`, its `--json`, completion, and the site
that `make docs` builds.

Knows the pages of `ppctl/pages/` and the table of keys. Must not know how they are shown. Imports no torch, no Hydra
and no rich.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ppctl.config.argv import ALIASES, full_name
from ppctl.config.keys import Key, docstring, keys, mapping_with, sections, text_keys, type_text
from ppctl.config.metadata import MEANING, PYTHON
from ppctl.config.model_parallel_config import DTYPES
from ppctl.schedule.policies import POLICIES

PAGES = Path(__file__).resolve().parent.parent / "pages"

SCHEDULE = "pipeline.pp_schedule"
"""The key of whose values it is said when to take which."""

_HEADING = re.compile(r"^## (PP-E[0-9]{3}) (.+)$", re.MULTILINE)


@cache
def pages() -> dict[str, tuple[str, str]]:
    """Error code -> (title, text), from all pages, sorted by code."""
    sections_by_code = {}
    for path in PAGES.glob("E*.md"):
        _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for code, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            sections_by_code[code] = (title, text.strip())
    return dict(sorted(sections_by_code.items()))


def code_of(topic: str) -> str:
    """The code that `E101`, `pp-e101` or `PP-E101` means, whether or not it has a page."""
    return topic.upper() if topic.upper().startswith("PP-E") else f"PP-{topic.upper()}"


def keys_called(topic: str) -> list[Key]:
    """The keys that a topic means: by a full name, an alias, another system's name, or as the last part of their name.
    An entry of a mapping (`model.lora.rank`) means that.

    More than one where several sections have a key of that name. A section's own name means no key.
    """
    name = full_name(topic)
    owner = name if name in keys() else mapping_with(name)
    if owner is not None:
        return [keys()[owner]]
    return [] if name in sections() else [key for key in keys().values() if key.field == name]


def code_facts(code: str) -> dict[str, Any]:
    """An error code with its title and page."""
    title, text = pages()[code]
    return {"code": code, "title": title, "text": text}


def key_facts(key: Key) -> dict[str, Any]:
    """A key with its text and facts; `type`, `default` and `limit` are null where no text can set it."""
    support, names = key.facts.support, key.facts.names.split()
    settable = support.state != PYTHON
    facts: dict[str, Any] = {
        "key": key.name,
        "text": docstring(key),
        "type": ("text or null" if key.is_dtype else type_text(key.type)) if settable else None,
        "default": default(key) if settable else None,
        "limit": key.limit.words if key.limit is not None and settable else None,
        "alias": next((alias for alias, name in ALIASES.items() if name == key.name), None) if settable else None,
        "flags": [name for name in names if name.startswith("--")],
        "state": support.state,
        "meaning": MEANING[support.state],
        "notes": [line for line in (support.note, support.aside) if line],
        "takes": ["null", *DTYPES] if key.is_dtype else [],
    }
    if key.name == SCHEDULE:
        facts["use"] = {policy.name: policy.use for policy in POLICIES.values() if policy.trains}
    return facts


def summary(name: str) -> str:
    """The line about a section."""
    return (sections()[name].__doc__ or "").splitlines()[0]


def section_facts(name: str) -> dict[str, Any]:
    """A section with each of its keys that text can set."""
    return {"section": name, "text": summary(name), "keys": [key_facts(key) for key in keys_of(name)]}


def keys_of(section: str) -> list[Key]:
    """The keys of a section that text can set."""
    return [key for key in text_keys().values() if key.name.startswith(f"{section}.")]


def contents() -> dict[str, Any]:
    """All codes and sections, each in a line."""
    codes = [{"code": code, "title": title} for code, (title, _) in pages().items()]
    return {"codes": codes, "sections": [{"section": name, "text": summary(name)} for name in sections()]}


def default(key: Key) -> Any:
    """The value of a key that nobody sets."""
    configured = _configured() if key.name.startswith("parallel.") else {}
    return configured.get(key.name, key.default)


@cache
def _configured() -> dict[str, Any]:
    """The values of conf/parallel, which differ from the dataclass's documented defaults."""
    from ppctl.config.resources import conf_directory
    from ppctl.config.yaml_file import YamlFile

    values = YamlFile(conf_directory() / "parallel" / "default.yaml", "conf/parallel/default.yaml").values
    return {f"parallel.{name}": value for name, value in values.items()}
