"""Files of a run or a checkpoint as nobody writes them: cut, altered in each of their values, replaced by what is none.

The alterations follow from a file's own structure. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppctl.checkpoint.manifest import record_whole

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**18, 1e18, 10**400, float("inf"), float("nan"), "", "x", "../../etc/passwd", "a\0b"),
    *("\ud800", "\x1b[31m\n", [], [None], [[]], {}, {"": {}}, [-1, 10**18]),
)
"""What is put in place of every value."""
_DEEP = b'{"a":' + b"[" * 200_000

Change = Callable[[Path], None]


def put_pipe(file: Path) -> None:
    """A pipe that nobody writes: opening it to read waits for ever."""
    clear(file)
    os.mkfifo(file)


def put_device(file: Path) -> None:
    """A link to a device without an end."""
    clear(file)
    file.symlink_to("/dev/zero")


def put_link(file: Path) -> None:
    """A link to the same content elsewhere."""
    elsewhere = file.with_name(f".{file.name}.elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def put_directory(file: Path) -> None:
    """A directory."""
    clear(file)
    (file / "a").mkdir(parents=True)


def put_large(file: Path) -> None:
    """200 MB, of which the disk has nothing."""
    clear(file)
    with open(file, "wb") as stream:
        stream.truncate(200_000_000)


def put_deep(file: Path) -> None:
    """Brackets in brackets."""
    file.write_bytes(_DEEP)


def put_nothing(file: Path) -> None:
    """An empty file."""
    file.write_bytes(b"")


def cut(file: Path) -> None:
    """The first half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def put_bytes(file: Path) -> None:
    """No text."""
    file.write_bytes(b"\xff\xfe\0\x80" * 64)


ODD: tuple[Change, ...] = (
    *(put_pipe, put_device, put_link, put_directory, put_large, put_deep, put_nothing, cut, put_bytes),
)


def clear(file: Path) -> None:
    """Nothing is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def altered(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with one of its parts replaced or left out, and what was done; of the items of a list the first."""
    for place in _places(value):
        for other in VALUES:
            yield f"{'.'.join(map(str, place))}={other!a:.20}", _with(value, place, lambda _, other=other: other)
        if place and isinstance(place[-1], str):
            without = place[-1]
            yield (
                f"{'.'.join(map(str, place))} left out",
                _with(value, place[:-1], lambda found, key=without: {k: v for k, v in found.items() if k != key}),
            )


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in list(items)[:60]:
        yield from _places(each, (*place, key))


def _with(value: Any, place: tuple[str | int, ...], change: Callable[[Any], Any]) -> Any:
    if not place:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _with(value[place[0]], place[1:], change)
    return copy


def sealed(manifest: Any) -> bytes:
    """The text of a manifest of format 2 with these values, with the right seal."""
    if not isinstance(manifest, dict):
        return json.dumps(manifest).encode()
    entries = [f'"format": {json.dumps(manifest.get("format"))}']
    for key, value in manifest.items():
        if key in ("files", "tensors") and isinstance(value, dict) and value:
            lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            entries.append(f'"{key}": {{\n  {lines}\n }}')
        elif key not in ("format", "seal"):
            entries.append(f"{json.dumps(key)}: {json.dumps(value)}")
    body = "{\n " + ",\n ".join(entries)
    return f'{body},\n "seal": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'.encode()


def write_state(checkpoint: Path, state: Any) -> None:
    """Replace a checkpoint's state.json, with the right digest of it in the manifest."""
    text = json.dumps(state).encode()
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    record = record_whole(text)
    manifest["files"]["state.json"] = {"bytes": record.bytes, "header": record.header, "digest": record.digest}
    (checkpoint / "state.json").write_bytes(text)
    (checkpoint / "manifest.json").write_bytes(sealed(manifest))
