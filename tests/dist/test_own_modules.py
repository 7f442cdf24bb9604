"""The page on a user's own modules: its script is short, runs as it stands, and computes what one process computes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "own-modules.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 40, "the page promises a short script"
    path = tmp_path / "own.py"
    path.write_text(code)
    return path


def losses_of_one_process(num_stages: int) -> list[str]:
    """The page's model and data in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_stages)))
    inputs = torch.randn(8, 8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(20):
        losses = [nn.functional.mse_loss(model(x), x.flip(-1)) / 8 for x in inputs]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(f"{float(sum(loss.detach() for loss in losses)):.4f}")
    return found


def test_the_script_of_the_page_trains_as_one_process_does(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "interleaved_1f1b: bubble" in done.stdout
    losses = re.findall(r"step \d+: loss (\S+)", done.stdout)
    assert losses == losses_of_one_process(num_stages=4)
    assert float(losses[-1]) < 0.6 * float(losses[0]), "it learns"
