"""Nothing of ppctl runs what it reads: no pickles, collectives of objects, or code from data, but for what is listed.

Dumps of torch's own (`rank/watchdog.py`, `train/recordings.py`) are written by torch, and read by nothing of ppctl.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppctl

PACKAGE = Path(ppctl.__file__).parent

_LOAD = "torch.distributed.checkpoint.state_dict_loader.load"
ALLOWED = {
    ("checkpoint/writer.py", "Connection"): "its frames as bytes: send_bytes and recv_bytes, never send and recv",
    ("pretrained/from_dcp.py", "pickle"): "torch's checkpoints have an index that is a pickle",
    ("pretrained/from_dcp.py", "Unpickler"): "makes the records of such an index and nothing else",
} | {
    (
        f"agent/{file}.py",
        name,
    ): "torch's agents pickle the rendezvous' state: it is read with a proof alone (tests/torch/agent)"
    for file, names in {
        "job": "RendezvousClosedError RendezvousError RendezvousTimeoutError torch.distributed.elastic",
        "node": "RunResult SimpleElasticAgent WorkerGroup WorkerSpec WorkerState RendezvousClosedError",
        "rendezvous": "RendezvousConnectionError RendezvousInfo RendezvousTimeoutError RendezvousTimeout "
        "C10dRendezvousBackend DynamicRendezvousHandler",
    }.items()
    for name in names.split()
}
"""(file, what it uses): why it may."""

MODULES = re.compile(
    r"(_?pickle|cPickle|pickletools|copyreg|shelve|dbm|marshal|xmlrpc|dill|cloudpickle|joblib|jsonpickle|multiprocess"
    r"|(torch\.)?multiprocessing|torch\.package|torch\.hub|torch\.distributed\.(rpc|elastic)"
    r"|concurrent\.futures\.process|logging\.config)(\..*)?"
)
"""Whoever imports one, or a module of one, reads or exchanges pickles with it."""

OBJECTS = re.compile(
    r"((all_)?gather|scatter|broadcast|send|recv)_object(_list)?|_unpickler|_tensor_to_object|Unpickler"
    r"|(read|load)_pickle|(unsafe|full)_load(_all)?|(Unsafe|Full)Loader|run_(path|module)"
    r"|ProcessPoolExecutor|(FileSystem|Fsspec|HuggingFaceStorage)Reader|SourceFileLoader|exec_module"
)
"""Names that run what arrives, of whatever module."""

LOADERS = re.compile(r"(torch|numpy|yaml|dcp)\.load(_all)?|torch\..+\.load(_state_dict)?|numpy\..+\.read_array")
"""Functions that may run what they read, by their names in full."""

BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
SAFE = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False, "use_safetensors": True}
"""Arguments that have one harmless value. `torch.load` must have the first one."""


def faults(tree: ast.AST) -> Iterator[str]:
    """What runs what it reads."""
    full = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if MODULES.fullmatch(alias.name))
        elif isinstance(node, ast.ImportFrom):
            for name in (alias.name for alias in node.names):
                if MODULES.fullmatch(f"{node.module}.{name}") or OBJECTS.fullmatch(name):
                    yield name
        elif isinstance(node, ast.Attribute) and OBJECTS.fullmatch(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_name(node.value):
            yield node.value
        elif isinstance(node, ast.Call):
            yield from _of_call(node, full)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports give, and what they stand for in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((alias.asname, f"{module}{alias.name}") for alias in node.names if alias.asname)
            yield from ((alias.name, f"{module}{alias.name}") for alias in node.names if module and not alias.asname)


def _is_name(text: str) -> bool:
    """Of a module or function, as `getattr` and `import_module` take it."""
    return bool(OBJECTS.fullmatch(text) or MODULES.fullmatch(text))


def _of_call(node: ast.Call, full: dict[str, str]) -> Iterator[str]:
    first, dot, rest = ast.unparse(node.func).partition(".")
    name = full.get(first, first) + dot + rest
    given = {each.arg: each.value.value if isinstance(each.value, ast.Constant) else ... for each in node.keywords}
    if name.removeprefix("builtins.") in BUILTINS:
        yield name
    harmless = {"torch": "weights_only" in given, "yaml": "SafeLoader" in ast.unparse(node)}
    harmless["numpy"] = len(node.args) < 3  # the third one is allow_pickle
    if LOADERS.fullmatch(name) and not harmless.get(name.partition(".")[0], False):
        yield name
    yield from (f"{key}=" for key, harmless in SAFE.items() if given.get(key, harmless) is not harmless)


FOUND = {
    path.relative_to(PACKAGE).as_posix(): set(faults(ast.parse(path.read_text()))) for path in PACKAGE.rglob("*.py")
}


def test_nothing_that_is_read_is_run() -> None:
    found = {(file, what) for file, all_of_it in FOUND.items() for what in all_of_it}
    assert len(FOUND) > 100
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set(), "an exception that nothing needs"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads as read",
        "import multiprocessing.connection as c",
        "from multiprocessing import connection",
        "import torch.multiprocessing as mp",
        "from torch.distributed import rpc",
        "importlib.import_module('dill')",
        "import marshal, json",
        "class Own(pick.Unpickler): pass",
        "dist.all_gather_object(rows, row)",
        "from torch.distributed import broadcast_object_list",
        "getattr(dist, 'gather_object')(row)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=careful)",
        "numpy.load(file, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "__import__('pickle').loads(data)",
        "dcp.load(state, checkpoint_id=path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "pandas.read_pickle(path)",
        "from torch import load\nload(file)",
        "import torch as t\nt.load(file)",
        "from torch import serialization as s\ns.load(file)",
        "torch.jit.load(file)",
        "import numpy as np\nnp.load(file, None, True)",
        "from yaml import load as read, Loader\nread(text, Loader)",
        "import builtins\nbuiltins.exec(text)",
        "from concurrent.futures import ProcessPoolExecutor",
        "from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp\nload_with_dcp(state)",
        "from torch.distributed import checkpoint as c\nc.load(state)",
        "class Own(filesystem.FileSystemReader): pass",
        "spec.loader.exec_module(module)",
    ],
)
def test_what_would_be_added_is_found(text: str) -> None:
    assert set(faults(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(file, weights_only=True)",
        "yaml.load(text, Loader=SafeLoader)",
        "numpy.load(file)",
        "import numpy as np\nnp.load(file, 'r')",
        "from ppctl.data import load\nload(file)",
        "model.eval()",
        "json.loads(text)",
        "re.compile(text)",
        "from torch import distributed",
    ],
)
def test_what_reads_values_alone_is_not(text: str) -> None:
    assert not set(faults(ast.parse(text)))
