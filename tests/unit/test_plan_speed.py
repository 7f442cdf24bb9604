"""A plan of 2,048 GPUs takes at most twice what composing the same files with Hydra alone takes."""

import resource
import subprocess
import sys
from pathlib import Path

CONF = Path(__file__).parents[2] / "conf"
BARE = """
from hydra import compose, initialize_config_dir
with initialize_config_dir({conf!r}, version_base="1.3"):
    compose("config", overrides=["model=deepseek_v3"])
"""


def cpu_seconds(*command: str) -> float:
    """CPU time of a process with all it does: on a busy machine, wall time says nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_planning_deepseek_v3_costs_at_most_twice_a_bare_compose() -> None:
    bare = ["-c", BARE.format(conf=str(CONF))]
    plan = ["-m", "ppctl", "plan", "+recipe=deepseek_v3", "--json"]
    pairs = [(cpu_seconds(*bare), cpu_seconds(*plan)) for _ in range(4)]
    assert min(planned for _, planned in pairs) <= 2 * min(composed for composed, _ in pairs), pairs
