"""The problems of words on the command line that name nothing, each with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.argv import ALIASES, PLACE, quote
from ppctl.config.checks import check
from ppctl.config.flags import meant_by
from ppctl.config.keys import did_you_mean, misspelt, nearest, sections, text_keys
from ppctl.config.mapping import convert, not_a_section, unknown_key
from ppctl.config.metadata import LATER
from ppctl.config.name_tables import AUTOMODEL, TORCHTITAN, tables
from ppctl.config.resources import YAML, groups, recipes
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import expanded


def not_an_override(word: str) -> Problem:
    """The problem of a word on the command line that is neither an override nor a flag."""
    close = nearest(word, recipes())
    remedy = pasted(f"+recipe={close[0]}") if close else "ppctl --help"
    return Problem("PP-E105", f"{word} is not an override, which is KEY=VALUE", remedy, PLACE)


def no_such_option(group: str, option: str, options: Sequence[str]) -> Problem:
    """The problem of an option that does not exist; for a recipe, files are suggested, too."""
    if group == "recipe" and option.endswith(YAML):
        twins = [twin for ending in YAML if (twin := expanded(option).with_suffix(ending)).is_file()]
        ways = [*(pasted(f"+recipe={twin}") for twin in twins), f"ppctl recipes copy quickstart {pasted(option)}"]
        return Problem("PP-E104", f"there is no recipe file {option}", "\n".join(ways), PLACE)
    close = nearest(option, options)
    message = f"there is no {group} {option or repr(option)}{did_you_mean(option, options)}"
    if not close:
        message += f"; there {'are' if len(options) > 1 else 'is'} {', '.join(options)}"
    usual = "ppctl recipes" if group == "recipe" else f"{group}={options[0]}"
    return Problem("PP-E104", message, pasted(f"{group}={close[0]}") if close else usual, PLACE)


def no_such_key(key: str, text: str) -> Problem:
    """The problem of a key that does not exist, or is a section; `text` is the value for the key."""
    if key.split(".")[0] == "hydra":
        return Problem("PP-E122", f"{key}: Hydra's own settings have no effect here; leave it out", place=PLACE)
    if key in sections():
        return not_a_section(key, PLACE)
    if (within := _within_a_field(key, text)) is not None:
        return within
    if (elsewhere := _of_another_system(key, text)) is not None:
        return elsewhere
    last = key.rpartition(".")[2]
    if {"lora", "peft", "adapter"} & {*last.lower().split("_")}:
        adapters = "model.lora.rank=16 'model.lora.targets=[q_proj,v_proj]'"
        return Problem("PP-E101", f"there is no key {key}: model.lora trains adapters", adapters, PLACE)
    known = ALIASES.get(last) or meant_by(last)
    if known is not None and text_keys()[known].facts.support.state == LATER:
        coming = f"there is no key {key}; {known}, which is like it, comes in a later release: leave it out"
        return Problem("PP-E101", coming, place=PLACE)
    close = [known] if known else nearest(key, [*text_keys(), *ALIASES, *groups()])
    # A similar name may mean something else: its value is not carried over.
    named = [name for name in close if name == known or misspelt(key, name)]
    meant = [name for name in close if text in groups().get(name, ()) or (name in named and _fits(name, text))]
    return unknown_key(key, PLACE, close, pasted(f"{meant[0]}={text}") if meant else "")


def _within_a_field(key: str, text: str) -> Problem | None:
    mapping = "model.hf_overrides"
    field, _, inner = key.removeprefix(f"{mapping}.").partition(".")
    if not key.startswith(f"{mapping}.") or not inner:
        return None
    message = f"{key}: a field of config.json can only be set as a whole, as JSON with all its parts"
    value = text if text.replace(".", "", 1).isdecimal() or text in ("true", "false", "null") else f'"{text}"'
    example = f'{mapping}.{field}={{"{inner}": {value}}}'
    return Problem("PP-E101", message, pasted(example), PLACE)


def _of_another_system(key: str, text: str) -> Problem | None:
    """The problem of a setting of torchtitan's or Automodel's, with its meaning here; None for other words."""
    from ppctl.config.translate import of_key  # the tables of other systems' names

    pages = [tables(system) for system in (TORCHTITAN, AUTOMODEL) if "." in key]
    found = next(filter(None, (of_key(page, key, text) for page in pages)), None)
    if found is None:
        return None
    message = f"there is no key {key}: {found.why or 'the setting has another name'}"
    remedy = found.override or (f"ppctl explain {found.why.split()[0].rstrip(',:')}" if found.code == "PP-E107" else "")
    return Problem("PP-E101", message if remedy else f"{message}; leave it out", remedy, PLACE)


def _fits(name: str, text: str) -> bool:
    from ppctl.config.hydra_source import parse

    key = ALIASES.get(name, name)
    try:
        value = parse(f"{key}={quote(key, text)}").value()
    except ConfigError:
        return False
    if "${" in str(value):
        return False
    config, wrong = convert({key: value}, str)
    return not wrong and not any(problem.place.startswith(f"{key} = ") for problem in check(config, {}))
