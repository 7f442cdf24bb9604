"""`ppctl train` of the quickstart under every schedule: the losses and norms of one plain-torch process, to the bit."""

from __future__ import annotations

import pytest
from command import TINY, metrics, only_run, ppctl
from oracle.data import microbatches
from oracle.reference import train_reference

from ppctl.config.compose import compose
from ppctl.schedule.policies import AUTO, POLICIES

STEPS = 4
SCHEDULES = [
    *((name, 2, policy.chunks) for name, policy in POLICIES.items() if policy.trains),
    ("gpipe", 2, 2),
    ("interleaved_zero_bubble", 2, 3),
    ("zb_h2", 3, 1),
    ("dualpipev", 3, 2),
    (AUTO, 2, 1),
    (AUTO, 2, 2),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("".join(f"rank {n} has stage {n % 7} and waits for {n % 3}\n" for n in range(2000)))
    return f"data.path={path}"


@pytest.fixture(scope="module")
def expected(text) -> tuple[list[float], list[float]]:
    """Losses and norms of one process, of a config without a cut or schedule."""
    config = compose(["+recipe=quickstart", *TINY, f"steps={STEPS}", text], for_training=True).config
    trained = train_reference(config.model, config.optim, config.train.seed, microbatches(config, STEPS))
    return trained.losses, trained.norms


@pytest.mark.whole
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "pp", "vpp"), SCHEDULES)
def test_the_quickstart_has_the_same_bits_under_every_schedule(text, expected, tmp_path, name, pp, vpp):
    cut = (f"pp={pp}", f"vpp={vpp}", f"pipeline.pp_schedule={name}")
    done = ppctl("train", "+recipe=quickstart", *TINY, f"steps={STEPS}", text, *cut, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    records = metrics(run)
    assert ([r["loss"] for r in records], [r["grad_norm"] for r in records]) == expected
    splits = name == AUTO or POLICIES[name].splits
    assert ("W" in (run / "schedule.csv").read_text()) is splits
