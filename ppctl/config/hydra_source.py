"""All that ppctl uses of Hydra, private names included: no other module imports Hydra or OmegaConf. Import it lazily.

Offers `parse` (the override grammar), `combinations` (its choices and ranges), `load` (the defaults list: groups,
`override /group: x`, packages, over conf/ and the recipe directories) and `interpolated` (`${...}`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from typing import Any

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl.config.argv import PLACE, Arguments, in_quotes, quote
from ppctl.config.keys import text_keys, value_text
from ppctl.config.mapping import key_called, leaves, nested
from ppctl.config.resources import Recipe, conf_directory, find_recipe, groups, recipes, shown
from ppctl.config.yaml_file import YamlFile
from ppctl.errors import ConfigError, Problem


@dataclass
class PpctlSource(ConfigSource):
    """conf/ as Hydra's root, with the recipe directories mounted as the group `recipe`."""

    provider: str = "ppctl"
    path: str = ""
    chosen: Recipe | None = None
    """The chosen recipe, which may lie outside the recipe directories."""
    files: dict[str, YamlFile | None] = field(default_factory=dict)

    @staticmethod
    def scheme() -> str:
        """The scheme of this source's address."""
        return "ppctl"

    def available(self) -> bool:
        """True: the files ship with the package."""
        return True

    def file(self, config_path: str) -> YamlFile | None:
        """The file of a config path such as `recipe/quickstart`; None if there is none."""
        name = config_path.removesuffix(".yaml")
        if name not in self.files:
            self.files[name] = self._find(name)
        return self.files[name]

    def _find(self, name: str) -> YamlFile | None:
        group, _, option = name.rpartition("/")
        if group == "recipe":
            recipe = self.chosen if self.chosen and option == self.chosen.name else recipes().get(option)
            return YamlFile(recipe.path, recipe.label) if recipe else None
        path = conf_directory() / f"{name}.yaml"
        return YamlFile(path, shown(path)) if path.is_file() else None

    def load_config(self, config_path: str) -> ConfigResult:
        """The file, with a recipe going to the root of the tree unless its header says otherwise."""
        file = self.file(config_path)
        if file is None:
            raise ConfigLoadError(f"no config {config_path}")
        header = ConfigSource._get_header_dict(file.text[:512])
        if header.get("package") is None and config_path.startswith("recipe/"):
            header["package"] = "_global_"
        # Hydra needs to see only the defaults list: values are read apart from it, as plain data, which is faster.
        seen = OmegaConf.create({key: value for key, value in file.values.items() if key == "defaults"})
        return ConfigResult(provider=self.provider, path=file.label, config=seen, header=header)

    def is_group(self, config_path: str) -> bool:
        """Whether the path names a group."""
        return config_path in groups()

    def is_config(self, config_path: str) -> bool:
        """Whether the path names a file."""
        return self.file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The options of a group, or the groups of the root."""
        return groups().get(config_path, []) if config_path else sorted(groups())


class _Repository(ConfigRepository):
    """Hydra's repository over one source, made here instead of by a registry of plugins."""

    def __init__(self, source: PpctlSource) -> None:
        self.source = source
        super().__init__(config_search_path=ConfigSearchPathImpl())

    def initialize_sources(self, config_search_path: Any) -> None:
        """Take the one source, whatever the search path is."""
        self.sources = [self.source]


def parse(text: str) -> Override:
    """Read one override in Hydra's grammar. Raises a ConfigError that quotes the override."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        reason = (str(error) or str(error.__cause__)).splitlines()[0].partition(" expecting {")[0]
        message = f"{text} cannot be read: {reason}; quote a value that holds brackets, commas or blanks"
        raise ConfigError(Problem("PP-E105", message, place="command line")) from None


MOST_RUNS = 256
"""The most runs of one command line: all plans are in memory while they are checked."""


def combinations(line: Arguments) -> list[Arguments]:
    """The command line of each run of a line with lists of values: the last list varies fastest, equal lines come once.
    Raises ConfigError for text outside Hydra's grammar (PP-E105, PP-E106) and too many runs (PP-E106)."""
    lists = {key: _listed(key, text) for key, text in line.lists.items()}
    if prod(map(len, lists.values())) > MOST_RUNS:
        message = f"{' x '.join(f'{len(values)} of {key}' for key, values in lists.items())} are too many runs"
        raise ConfigError(Problem("PP-E106", f"{message}: at most {MOST_RUNS}", "ppctl explain PP-E106", PLACE))
    words = [[f"{key}={quote(key, value_text(value))}" for value in values] for key, values in lists.items()]
    found = dict.fromkeys(product(*words))
    return [replace(line, overrides=[*line.overrides, *each], lists={}, problems=[*line.problems]) for each in found]


def _listed(key: str, text: str) -> list[Any]:
    """The values that `text` lists, cut off above the most runs; quoted text stays quoted. Raises ConfigError."""
    override = parse(f"{key}={text}")
    try:
        values = (
            islice(override.sweep_iterator(), MOST_RUNS + 1) if override.is_sweep_override() else [override.value()]
        )
        return [value.with_quotes() if isinstance(value, QuotedString) else value for value in values]
    except (HydraException, ValueError) as error:
        message = f"{key}={text} has no list of values: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("PP-E106", message, f"{key}=VALUE,VALUE", PLACE)) from None


def load(choices: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """(dotted key, value, source) of all values in a config's files, weakest first. `choices` are the chosen options by
    group. Raises ConfigError if a file cannot be read, or a defaults list names unknown files or contradicts itself."""
    version.setbase("1.3")
    source = PpctlSource(chosen=find_recipe(choices.get("recipe", "")))
    overrides = [f"{group}={option}" for group, option in choices.items() if group != "recipe"]
    overrides += [f"+recipe={in_quotes(source.chosen.name)}"] if source.chosen else []
    try:
        resolved = create_defaults_list(
            repo=_Repository(source),
            config_name="config",
            overrides_list=[parse(override) for override in overrides],
            prepend_hydra=False,
            skip_missing=False,
        )
    except RecursionError:
        raise _header_of(source, "it includes itself") from None
    except (HydraException, ValueError, TypeError, AssertionError) as error:  # the last three of a malformed list
        reason = str(error).split("\nConfig search path")[0].strip() or "an item of its defaults list has no group"
        raise _header_of(source, reason) from None
    return [
        value
        for default in resolved.defaults
        if (file := source.file(default.config_path or "")) is not None
        for value in _values_of(file, default.config_path or "", default.package or "")
    ]


def _values_of(file: YamlFile, path: str, package: str) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, source) of what a file sets below `package`."""
    prefix = f"{package}." if package else ""
    recipe = path.removeprefix("recipe/") if path.startswith("recipe/") else None
    values = {name: value for name, value in file.values.items() if name != "defaults"}
    for name, value in leaves(values, prefix):
        line = file.lines.get(name.removeprefix(prefix))
        place = f"{file.label}:{line}" if line else file.label
        yield key_called(name), value, f"recipe {recipe} ({place})" if recipe else place


def _header_of(source: PpctlSource, reason: str) -> ConfigError:
    """The error about the header or defaults list of the chosen recipe; without a recipe, of conf/config.yaml."""
    file = source.file(f"recipe/{source.chosen.name}" if source.chosen else "config")
    assert file is not None  # it was read before
    return file.error(f"cannot be composed: {reason}", file.lines.get("defaults", 1))


LONGEST_INTERPOLATED = 2**16
"""The most characters that interpolations of one key may bring in from other interpolated texts."""
_NAMED, _NESTED = re.compile(r"([\w-]+)(?:\[\w+\])*\s*\}"), re.compile(r"\$\{[^}]*\$\{")


def interpolated(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The values of `names`, which have `${...}` in them, resolved one by one; for a failed value its exception."""
    texts = {path: text for name in names for path, text in _texts(values[name], name)}
    resolved: dict[str, Any] = {}
    for name in names:
        own = [path for path in texts if path == name or path.startswith(f"{name}.")]
        if sum(_length(path, texts, {}) for path in own) > LONGEST_INTERPOLATED:
            resolved[name] = ValueError(f"it becomes longer than {LONGEST_INTERPOLATED} characters")
            continue
        try:
            OmegaConf.create({"value": values[name]})
        except (OmegaConfBaseException, RecursionError) as error:
            resolved[name] = error
    defaults = {name: text_keys()[name].default for name in resolved}
    tree = OmegaConf.create(nested({**{name: values[name] for name in text_keys()}, **defaults}))
    for name in names:
        if name not in resolved:
            try:
                value = OmegaConf.select(tree, name)
                resolved[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                resolved[name] = error
    return resolved


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of all texts with `${...}` in a value."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _texts(each, f"{path}.{key}")
    if isinstance(value, str) and "${" in value:
        yield path, value


def _length(path: str, texts: Mapping[str, str], known: dict[str, int]) -> int:
    """An upper bound of a text's length after interpolation. Texts may name each other twice at each of many levels:
    without a limit a few lines would take hours and fill the memory. A cycle counts as its first round."""
    if path not in known:
        known[path] = 0
        named = _NAMED.findall(texts[path])
        brought = [other for word in named for other in texts if word in other.split(".")]
        brought += [*texts] * len(_NESTED.findall(texts[path]))  # it may become any name
        own = len(texts[path]) * texts[path].count("${")  # reading nested ones takes quadratic time
        known[path] = own + sum(_length(other, texts, known) for other in brought)
    return known[path]
