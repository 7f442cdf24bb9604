"""What ranks agree on before and after a save or a load: one result for all or one error for all, and no program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.errors import CheckpointError


class MakesADirectory:
    """On the rank that unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def codes_of(work: Any, conclude: Any, **kinds: Any) -> Any:
    try:
        return AgreeingRanks(None).agree("agree", work, conclude, **kinds)
    except CheckpointError as error:
        return [problem.code for problem in error.problems]


def with_harm(path: str, by_rank_0: bool) -> Any:
    harm = MakesADirectory(path)
    if by_rank_0:
        return codes_of(lambda: None, lambda _: harm)
    return codes_of(lambda: harm if dist.get_rank() else None, lambda found: None)


def test_no_rank_runs_what_another_one_sends(tmp_path: Path) -> None:
    for by_rank_0 in (False, True):
        assert run_ranks(with_harm, 2, str(tmp_path / "harm"), by_rank_0) == [["PP-E507"]] * 2
    assert not (tmp_path / "harm").exists()


def of_types() -> list[Any]:
    rank = dist.get_rank()
    return [
        codes_of(lambda: (rank, b"\0" * rank), list, each=tuple[int, bytes], result=list[tuple[int, bytes]]),
        codes_of(lambda: rank, sum, each=int, result=int),
        codes_of(lambda: rank / 0, sum, each=int, result=int),
        codes_of(lambda: rank, lambda found: {}["no"], each=int, result=int),
        codes_of(lambda: "text" if rank else 1, sum, each=int, result=int),
    ]


def test_results_keep_their_types_and_errors_reach_all() -> None:
    values = [(0, b""), (1, b"\0")]
    for found in run_ranks(of_types, 2):
        assert found == [values, 1, ["PP-E507", "PP-E507"], ["PP-E507"], ["PP-E507"]]
