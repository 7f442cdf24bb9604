"""Seconds of stages as ranks really stamp them: `python tests/helpers/recorded_stamps.py` records tests/golden's anew.

Eight ranks train a small model, quietly, and once more with one rank that computes ten per cent longer in all it does
from a step on. They share this machine's cores with each other and with whatever else runs, as ranks on a cluster do
not: so the stamps are of the clock that counts what a thread computes, and not how long it waits for a core. What is
left is the noise of caches, and of two threads on one core: recorded on two cores under a load of 8, a rank's seconds
differ from its peers' by 7.5 % (standard deviation), and often for tens of steps in one direction.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "golden" / "stage_seconds.json"
QUIET, SLOW, FROM, RANK, BY = 1000, 100, 40, 5, 1.1
SIZES = dict(pp=2, vpp=None, dp=4, m=2)


def stamped(mapping: dict, steps: int, slow: bool) -> list[list[list[int]]]:
    """On rank 0 the microseconds of stages [steps, ranks, chunks] of so many steps; nothing on the others."""
    from dense_runs import session_of, trainer_of

    from ppctl.engine import recorder

    recorder.perf_counter = time.thread_time  # type: ignore[attr-defined]
    trainer = trainer_of(session_of(mapping))
    kept: list[list[list[int]]] = []
    note, end, step = trainer.stragglers.note, recorder.Recorder.end, 0

    def noted(at: int, seconds):  # type: ignore[no-untyped-def]
        kept.append((1e6 * seconds).astype(int).tolist())
        return note(at, seconds)

    def slower(self: recorder.Recorder, index: int) -> None:
        until = self._starts[index] + BY * (time.thread_time() - self._starts[index])
        while slow and dist.get_rank() == RANK and step >= FROM and time.thread_time() < until:
            pass
        end(self, index)

    trainer.stragglers.note = noted  # type: ignore[method-assign]
    recorder.Recorder.end = slower  # type: ignore[method-assign]
    for step in range(steps):  # `slower` reads it
        trainer.step(step)
    return kept


def main() -> None:
    from dense_runs import config_of
    from ranks import run_ranks
    from recorded_stamps import stamped  # by the name under which ranks import it

    from ppctl.config.mapping import to_mapping

    config = config_of(Path(), **SIZES)
    config.data.path = None
    config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size = 4, 64, 192
    config.data.seq_length, config.train.steps = 64, QUIET
    told = {
        name: run_ranks(stamped, 8, to_mapping(config), steps, name == "slow", timeout=1500)[0]
        for name, steps in (("quiet", QUIET), ("slow", SLOW))
    }
    told = {
        "made": f"python tests/helpers/recorded_stamps.py, {time.strftime('%F')}, load {os.getloadavg()[0]:.0f}",
        **told,
    }
    FILE.write_text(json.dumps(told, separators=(",", ":")).replace("]],[[", "]],\n[[") + "\n")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    main()
