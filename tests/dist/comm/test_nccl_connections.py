"""NCCL's connections as far as a build of torch without NCCL goes: every name that they use is one of torch's stubs.

tests/gpu runs them on a device.
"""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppctl.comm.connections import MAKERS, MAX_CTAS, connection_name

STUBS = ast.parse((Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text())
NCCL = "ProcessGroupNCCL"


def declared(name: str) -> dict[str, ast.stmt]:
    """What a class of the stubs has, its bases' included: attributes, properties, functions and classes by name."""
    body: list[ast.stmt] = STUBS.body
    found: dict[str, ast.stmt] = {}
    for part in name.split("."):
        node = next(each for each in body if isinstance(each, ast.ClassDef) and each.name == part)
        body = node.body
    for base in node.bases:
        found |= declared(ast.unparse(base))
    for each in body:
        found[ast.unparse(each.target) if isinstance(each, ast.AnnAssign) else getattr(each, "name", "")] = each
    return found


def parameters(name: str) -> list[str]:
    """What an object of the class is made from, in order."""
    made = declared(name)["__init__"]
    assert isinstance(made, ast.FunctionDef)
    return [each.arg for each in made.args.args[1:]]


class Declared:
    """An object of a class of the stubs: it has what they declare, and nothing else."""

    def __init__(self, of: str, **fields: Any) -> None:
        self.__dict__.update(fields, of=of)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in declared(self.of):
            raise AttributeError(f"{self.of} has no {name}")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        if not isinstance(declared(self.of).get(name), ast.FunctionDef):
            raise AttributeError(f"{self.of} has no {name}, or nothing has set it")
        return lambda *arguments: None


class Nccl(Declared):
    """`dist.ProcessGroupNCCL` by its stub."""

    def __init__(self, *given: Any) -> None:
        super().__init__(NCCL, made=dict(zip(parameters(NCCL), given, strict=True)))

    @staticmethod
    def Options(**given: Any) -> Declared:
        assert given.keys() <= set(parameters(f"{NCCL}.Options"))
        return Declared(f"{NCCL}.Options", config=Declared(f"{NCCL}.NCCLConfig"), given=given)


def test_a_connection_is_made_with_options_that_torch_has_and_ours_in_them(monkeypatch) -> None:
    monkeypatch.setattr(dist, NCCL, Nccl, raising=False)
    store, name, limit = dist.HashStore(), connection_name((4, 6), 0, "0-1-F/body"), timedelta(seconds=77)
    made = MAKERS["nccl"](store, 1, (4, 6), name, limit).made
    assert (made["store"], made["rank"], made["size"]) == (store, 1, 2)
    options = made["options"]
    assert options.given == {"is_high_priority_stream": True}
    assert options.config.max_ctas == MAX_CTAS
    assert (options._timeout, options.global_ranks_in_group, options.group_name) == (limit, [4, 6], name)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build of torch without NCCL")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu goes further")
def test_nccl_itself_takes_the_options_and_asks_for_a_device() -> None:
    given = dist.HashStore(), 0, (4, 6), connection_name((4, 6), 0, "0-1-F/body"), timedelta(seconds=77)
    with pytest.raises(ValueError, match="only supported with GPUs, no GPUs found"):
        MAKERS["nccl"](*given)


@pytest.mark.parametrize("of", [NCCL, f"{NCCL}.Options", f"{NCCL}.NCCLConfig"])
def test_a_name_that_torch_has_not_would_be_found(of: str) -> None:
    with pytest.raises(AttributeError, match=r"has no max_cta$"):
        Declared(of).max_cta = 4
    with pytest.raises(AttributeError, match="has no _set_sequence_number,"):
        _ = Declared(of)._set_sequence_number


def test_what_a_channel_asks_of_its_backend_is_declared() -> None:
    """But for `send` and `recv` (`Transport`), which the stubs leave out: tests/gpu calls them."""
    assert {"shutdown", "get_error", "rank", "size"} <= declared(NCCL).keys()
    assert parameters("ProcessGroupUCC") == ["store", "rank", "size", "timeout"]
