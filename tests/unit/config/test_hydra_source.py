"""The private parts of Hydra that ppctl stands on are there, and compose what they should."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ppctl
from ppctl.config.compose import compose
from ppctl.config.hydra_source import load, parse
from ppctl.config.resources import conf_directory, groups, recipes_directory
from ppctl.errors import ConfigError


def test_the_private_names_exist():
    from hydra import version
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.plugins.config_source import ConfigSource

    assert ObjectType.CONFIG
    assert all(
        callable(thing)
        for thing in (
            version.setbase, ConfigRepository.initialize_sources, ConfigSearchPathImpl, create_defaults_list,
            OverridesParser.create().parse_override, ConfigSource._get_header_dict,
        )
    )  # fmt: skip


def test_no_other_module_imports_hydra_or_omegaconf():
    package = Path(ppctl.__file__).parent
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) (hydra|omegaconf)\b", path.read_text(), re.MULTILINE)
    }
    assert importers == {"config/hydra_source.py"}


PARALLEL, ROOT, QUICK = ("conf/parallel/default.yaml", "parallel"), ("conf/config.yaml", ""), ("recipe quickstart", "")


@pytest.mark.parametrize(
    ("choices", "files"),
    [
        ({}, [PARALLEL, ROOT]),
        ({"recipe": "quickstart"}, [PARALLEL, ("conf/model/tiny.yaml", "model"), ROOT, QUICK]),
        (
            {"recipe": "quickstart", "model": "llama3_8b"},
            [PARALLEL, ("conf/model/llama3_8b.yaml", "model"), ROOT, QUICK],
        ),
    ],
)
def test_files_stack_weakest_first_each_below_its_section(choices, files):
    stacked = {}
    for key, _, source in load(choices):
        stacked.setdefault(source.partition(" (")[0].partition(":")[0], set()).add(key.partition(".")[0])
    assert list(stacked) == [file for file, _ in files if file != "conf/config.yaml"]  # which sets nothing itself
    assert all(stacked[file] == {section} for file, section in files if section)


def test_groups_are_the_folders_of_conf_and_the_recipes():
    found = groups()
    assert set(found) == {"launch", "model", "parallel", "recipe"}
    assert "quickstart" in found["recipe"]


def test_a_recipe_may_use_the_names_that_the_command_line_takes(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {nonfinite: skip}\nmodel:\n  recompute_granularity: full\n")
    composed = compose([f"+recipe={recipe}"])
    assert (composed.config.train.on_bad_step, composed.config.train.recompute_granularity) == ("skip", "full")
    assert composed.provenance["train.recompute_granularity"] == f"recipe mine ({recipe}:3)"


def test_an_override_that_cannot_be_read_is_told():
    with pytest.raises(ConfigError, match=r"PP-E105: train\.steps=\( cannot be read: [^;{]*; quote a value"):
        parse("train.steps=(")


def test_an_installed_copy_works_from_any_directory(tmp_path):
    package = tmp_path / "site" / "ppctl"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(ppctl.__file__).parent, package, ignore=skip)
    shutil.copytree(conf_directory(), package / "_conf", ignore=skip)
    shutil.copytree(recipes_directory(), package / "_recipes", ignore=skip)
    program = (
        "import ppctl; from ppctl.config.compose import compose; from ppctl.config.resources import recipes; "
        "c = compose(['recipe=quickstart']); path = recipes()['quickstart'].path; "
        "print(ppctl.__file__, path, c.config.parallel.pipeline_model_parallel_size)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "_recipes" / "quickstart.yaml"), "2"]
