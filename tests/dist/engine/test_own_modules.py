"""The scripts for a user's own modules, of README and docs: short, and run as they stand, with the right results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[3]


def code_of(page: str, lines: int, which: int = -1) -> str:
    """A page's last script in Python, or another one, which has at most so many lines that are not blank."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[which]
    assert len([line for line in code.splitlines() if line.strip()]) <= lines, "the page promises a short script"
    return str(code)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    code = code_of("docs/own-modules.md", 40)
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


def test_the_script_for_torchs_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    code = code_of("docs/inside-torch.md", 24)
    (tmp_path / "inside.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(tmp_path / "inside.py")], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    stages = []
    for rank in range(2):
        torch.manual_seed(rank)
        stages.append(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    model = nn.Sequential(*stages)
    torch.manual_seed(9)
    x, optimizer = torch.randn(32, 16), torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(5):
        losses = [nn.functional.mse_loss(model(part), 0.5 * part.flip(-1)) for part in x.split(4)]
        for loss in losses:
            loss.backward()
        for parameter in model.parameters():
            parameter.grad.div_(8)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(f"{torch.stack(losses).mean():.6f}")
    assert re.findall(r"step \d+: loss (\S+)", done.stdout) == expected


def gradients_of_one_process(num_stages: int) -> list[float]:
    """The norm of each stage's gradient in the README's example, in a plain loop."""
    stages = []
    for _ in range(num_stages):
        torch.manual_seed(0)  # every rank of the example draws its stage anew
        stages.append(nn.Linear(64, 64))
    data = torch.randn(8, 16, 2, 64, generator=torch.Generator().manual_seed(0))
    for batch in data:
        out = batch
        for stage in stages:
            out = stage(out).tanh()
        ((out - batch.flip(0)).pow(2).mean() / len(data)).backward()
    return [float(stage.weight.grad.norm()) for stage in stages]


def test_the_readmes_example_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "stages.py"
    path.write_text(code_of("README.md", 25))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"rank (\d): (\d+ losses, gradient \d+\.\d+)", done.stdout))
    first, last = (f"{norm:.4f}" for norm in gradients_of_one_process(2))
    assert said == {"0": f"0 losses, gradient {first}", "1": f"8 losses, gradient {last}"}


def test_the_model_cut_by_names_trains_as_one_process_does(tmp_path: Path) -> None:
    code = code_of("docs/own-modules.md", 27, which=0)
    (tmp_path / "model.py").write_text(code)
    alone = code.replace("parts = [[", "parts = [sum([[").replace('"head"]]', '"head"]], [])]')
    (tmp_path / "alone.py").write_text(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for command in ([*torchrun, "model.py"], [sys.executable, "alone.py"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"step \d+: loss (\S+)", done.stdout))
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert float(losses[0][-1]) < float(losses[0][0])
