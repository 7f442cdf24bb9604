"""Reads the weights of a directory by the names that transformers' code gives them, one at a time.

transformers itself renames and combines the stored tensors: older names, prefixes, experts one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ppctl.errors import CheckpointError, Problem, listed, pasted
from ppctl.families.directory import UNREAD
from ppctl.families.safetensors import Stored, read_directory
from ppctl.foreign.cut import further_names
from ppctl.foreign.library import Conversions, make_model

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class StoredWeights:
    """Reads a model's tensors; files are mapped, not loaded.

    `config` is the library's config object; `shapes` has the shapes of all tensors of the model, by canonical name.
    Raises CheckpointError: PP-E523 for damaged files, PP-E524 naming every tensor that is missing or unknown, has a
    dtype that is not trained or parts of several dtypes, or differs from a tensor whose memory it shares in the model.
    """

    def __init__(self, directory: Path, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.directory, self.shapes = directory, shapes
        model: Any = make_model(config, "meta")
        self._headers = read_directory(directory)
        self._files: dict[Path, Any] = {}
        known = set(model.state_dict()) | {name for name, _ in model.named_buffers()}
        self._library = Conversions(model)
        self._parts: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
        """Canonical name -> the stored tensors that it is computed from, each with the pattern that it matched."""
        for name in sorted(self._headers, key=self._library.order):
            target, pattern = self._library.target_of(name)
            self._parts[target].append((pattern, name))
        self._refuse("lacks tensors of the model", [name for name in shapes if name not in self._parts])
        unknown = [name for name in self._parts if name not in known and not name.endswith(UNREAD)]
        self._refuse("holds tensors that the model lacks", unknown)
        other = [
            name for name, each in self._headers.items() if each.dtype not in _FLOATS and not name.endswith(UNREAD)
        ]
        self._refuse("holds tensors whose dtype transformers' own code is not trained with", other)
        mixed = [name for name in shapes if len({self._headers[part].dtype for _, part in self._parts[name]}) > 1]
        self._refuse("holds the parts of one tensor in several dtypes", mixed)
        shared = further_names(model)
        self.shapes = {**{name: self.shapes[of] for name, of in shared.items() if of in shapes}, **shapes}
        both = [(name, of) for name, of in shared.items() if name in self._parts and of in self._parts]
        values = ((f"{name} and {of}", self.tensor(of), self.tensor(name)) for name, of in both)
        unequal = [names for names, one, other in values if not torch.equal(one, other.to(one))]
        self._refuse("holds different values for names of one shared tensor of the model", unequal)

    def spec(self, name: str) -> Tensor:
        """Return the shape and dtype of what `tensor` will return, as a tensor on the meta device."""
        dtype = _FLOATS[self._headers[self._parts[name][0][1]].dtype]
        return torch.empty(self.shapes[name], dtype=dtype, device="meta")

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name, on the CPU. Raises CheckpointError (PP-E524) for another shape."""
        parts = self._parts[name]
        if parts[0][0] is None:
            whole = self._stored(parts[0][1])
        else:
            by_pattern: dict[str, list[Tensor]] = defaultdict(list)
            for pattern, stored in parts:
                by_pattern[str(pattern)].append(self._stored(stored))
            whole = self._library.converted(name, by_pattern)
        if tuple(whole.shape) != self.shapes[name]:
            shapes = f"{name}: {list(whole.shape)} stored, {list(self.shapes[name])} expected"
            self._refuse("holds tensors of another shape than the model's", [shapes])
        return whole

    def _stored(self, name: str) -> Tensor:
        header: Stored = self._headers[name]
        if header.file not in self._files:
            self._files[header.file] = safe_open(header.file, framework="pt")
        tensor: Tensor = self._files[header.file].get_tensor(name)
        return tensor

    def _refuse(self, fault: str, names: Iterable[str]) -> None:
        """Raise CheckpointError (PP-E524) with the fault and these names, if there are any."""
        if found := sorted(names):
            remedy = (
                f"compare the model's sizes with {pasted(self.directory / 'config.json')}, and that with the weights"
            )
            raise CheckpointError(Problem("PP-E524", f"{self.directory} {fault}", remedy, listed(found)))
