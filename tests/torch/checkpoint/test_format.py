"""`docs/checkpoint.md` is enough to read a checkpoint: its own code does, without ppctl."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import torch
from one_save import save
from xxhash import xxh3_128_hexdigest

from ppctl.checkpoint.boxes import boxes_of_run
from ppctl.checkpoint.shards import Shard

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint.md"
WHOLE = torch.arange(60.0).view(6, 10)


def saved(directory: Path) -> Path:
    """A tensor in seven boxes, as three data-parallel ranks would hold it, one that is whole, and a number."""
    boxes = [box for first in (0, 23, 46) for box in boxes_of_run((6, 10), first, min(first + 23, 60))]
    held = [Shard("w", (6, 10), box.offset, WHOLE[box.within((0, 0))]) for box in boxes]
    assert len(held) == 7
    held += [Shard("v", (3,), (0,), torch.arange(3.0)), Shard("n", (), (), torch.tensor(7.0))]
    return save(directory, 1, held, {"step": 1}, keep=0)


def test_the_code_on_the_page_reads_a_tensor(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert "ppctl" not in code and len(code.splitlines()) <= 20
    there: dict = {}
    exec(code, there)
    path = saved(tmp_path)
    assert np.array_equal(there["read"](path, "w"), WHOLE.numpy())
    assert there["read"](path, "v").tolist() == [0.0, 1.0, 2.0] and there["read"](path, "n") == 7.0


def test_what_the_page_says_of_the_manifest_holds(tmp_path: Path) -> None:
    path = saved(tmp_path)
    text = (path / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert manifest["seal"] == hashlib.sha256(text[: text.rindex(b',\n "seal"')]).hexdigest()
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    keys = {
        *manifest,
        *manifest["files"]["state.json"],
        *manifest["tensors"]["w"],
        *manifest["tensors"]["w"]["shards"][0],
    }
    assert keys <= named, keys - named
    for name, record in manifest["files"].items():
        data = (path / name).read_bytes()
        assert (len(data), xxh3_128_hexdigest(data[: record["header"]])) == (record["bytes"], record["digest"])
    for record in manifest["tensors"].values():
        for shard in record["shards"]:
            data = (path / shard["file"]).read_bytes()[slice(*shard["bytes"])]
            starts = range(0, len(data), manifest["chunk"])
            assert shard["digests"] == [xxh3_128_hexdigest(data[first : first + manifest["chunk"]]) for first in starts]
