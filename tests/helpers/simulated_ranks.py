"""What the ranks of a large job hold and have written, without any values: for what rank 0 does with it."""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.checkpoint.boxes import Box, boxes_of_run
from ppctl.checkpoint.disk import WrittenParts
from ppctl.checkpoint.tensor_parts import TensorPart, Writers
from ppctl.records import wire

DENSE, EXPERTS, WIDTH = 8, 12, 4099


def parts_of(rank: int, dp: int) -> list[TensorPart]:
    """The parts of one of `dp` replicas of a pipeline stage, as optimizer sharding divides them.

    Of dense matrices, masters and both moments, it holds a run read flat; experts of its own; the optimizer's counts of
    steps, which all replicas have.
    """
    return list(_parts(*divmod(rank, dp), dp))


def _parts(stage: int, replica: int, dp: int) -> Iterator[TensorPart]:
    keys = {"model": "", "optim": ".exp_avg", "optim2": ".exp_avg_sq"}
    shape = (WIDTH, WIDTH + 64)
    size = shape[0] * shape[1]
    run = (size * replica // dp, size * (replica + 1) // dp)
    for prefix, key in keys.items():
        for number in range(DENSE):
            name = f"{prefix[:5]}.layers.{stage}.block.{number}.weight{key}"
            for box in boxes_of_run(shape, *run):
                yield TensorPart(name, shape, "float32", box)
        for number in range(EXPERTS):
            name = f"{prefix[:5]}.layers.{stage}.moe.experts.{replica * EXPERTS + number}.w1.weight{key}"
            yield TensorPart(name, (512, 64), "float32", Box.whole((512, 64)))
    for number in range(DENSE):
        yield TensorPart(f"optim.layers.{stage}.block.{number}.weight.step", (), "float32", Box.whole(()))


def written_by(writers: Writers, held: list[list[TensorPart]]) -> list[bytes]:
    """What each rank reports once its file is written: digests that are equal where parts are."""
    found = []
    for own, parts in zip(writers.own, held, strict=True):
        begin, begins = 4096, []
        for one, part in zip(own, parts, strict=True):
            if one:
                begins.append(begin)
                begin += part.bytes
        chunks = [" ".join([f"{hash(part) & (1 << 128) - 1:032x}"] * -(-part.bytes // (16 << 20))) for part in parts]
        record = (begin, 4096, "0" * 32) if begins else None
        found.append(wire.packed(WrittenParts, WrittenParts(record, begins, chunks)))
    return found
