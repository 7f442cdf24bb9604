"""The tensor of a call is released before the interpreter ends: else a thread of gloo aborts the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time, torch
from ppctl.modules import pipeline_agreement as agreement

class Ranks:
    size, rank, group = 1, 0, None

call = agreement.SameCall(Ranks())
held = [call._ends * torch.ones(3, requires_grad=True)]  # a graph in C++ holds it, as gloo's threads do
def release():
    time.sleep(0.3)
    held.clear()
    print("released", flush=True)
threading.Thread(target=release, daemon=True).start()
"""


def test_the_end_of_a_program_waits_until_the_tensor_of_its_last_call_is_released() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "released\n"), done.stderr
