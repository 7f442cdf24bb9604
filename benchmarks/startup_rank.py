"""One rank of the plain side of `startup.py`: the imports, groups, stages and first step of a run, and nothing else."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import ppctl.rank.worker  # noqa: F401  the same imports
from ppctl.rank.live_state import Phases, process_age
from ppctl.rank.rendezvous import START_UP, OwnRank, meet
from ppctl.reach.start import join_world
from ppctl.runs.rundir import RunDir
from ppctl.train.session import build_session
from ppctl.train.step import Trainer


def main() -> None:
    phases = Phases()
    phases.add("import", process_age())
    run, own = RunDir(Path(sys.argv[1])), OwnRank.from_environment()
    config, plan, device = run.read_config(), run.read_plan(), torch.device("cpu")
    with phases("groups"):
        join_world(meet(own), own.rank, own.world_size, "cpu:gloo", START_UP)
    with phases("build"):
        session = build_session(config, plan, own.rank, device)
    trainer = Trainer(session, session.data.batches())
    with phases("first step"):
        trainer.step(0)
    print("step", json.dumps(phases.seconds), flush=True)
    time.sleep(60)  # whoever started this ends it


if __name__ == "__main__":
    main()
