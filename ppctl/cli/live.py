"""The block at the foot of the terminal while ranks train on this machine: their state, their progress, the loss."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppctl.cli.console import console, curve, prose
from ppctl.cli.runs import checkpoint_of
from ppctl.errors import visible
from ppctl.records.step_lines import RECENT, clock_text, figure, mean_step_time
from ppctl.runs import heartbeat
from ppctl.runs.checkpoint_folder import step_of
from ppctl.runs.rundir import RunDir

_DRAWINGS_A_SECOND = 2


@contextmanager
def live_block(run: RunDir, directory: Path, world_size: int, steps: int) -> Iterator[Callable[[str], None]]:
    """Draw the block while entered, then remove it; yields the function that prints rank 0's lines above the block."""
    block, screen = LiveBlock(run, directory, world_size, steps), console()
    with Live(
        get_renderable=lambda: block.draw(screen.width),
        console=screen,
        transient=True,
        refresh_per_second=_DRAWINGS_A_SECOND,
    ):
        yield lambda text: screen.out(
            prose(visible(text).removesuffix("\n").split("\n"), screen.width), highlight=False
        )


class LiveBlock:
    """The block of one start of a run. It reads only the lines appended to metrics.jsonl since it last read."""

    def __init__(self, run: RunDir, directory: Path, world_size: int, steps: int) -> None:
        self._run = run
        self._directory = directory
        self._ranks = range(world_size)
        self._steps = steps
        self._began = time.monotonic()
        self._metrics = run.metrics_file(at=run.metrics_path.stat().st_size if run.metrics_path.exists() else 0)
        self._recent: list[dict[str, Any]] = []
        self._losses: list[float] = []

    def draw(self, columns: int) -> Group | Text:
        """The block as it is now: the ranks' states until the first step is done, then the last step."""
        for record in self._metrics.read():
            self._recent = [*self._recent, record][-RECENT:]
            self._losses.append(record.get("loss") or math.nan)
        return self._training(columns) if self._recent else self._starting()

    def _starting(self) -> Text:
        states = heartbeat.read_all(self._directory, self._ranks)
        doing = Counter(
            "importing torch" if not state.pid else _STARTING.get(state.state, state.state) for state in states
        )
        shown = ", ".join(f"{word} ({count} of {len(self._ranks)} ranks)" for word, count in doing.most_common(2))
        return Text(f"{clock_text(time.monotonic() - self._began)}  {shown or 'starting ranks'}", style="dim")

    def _training(self, columns: int) -> Group:
        last = self._recent[-1]
        # With log.interval the last record may be many steps old; the ranks' own counts are not.
        states = heartbeat.read_all(self._directory, self._ranks)
        step = max(last["step"], min((state.step for state in states), default=0))
        left = (self._steps - step) * (mean_step_time(self._recent) or 0.0)
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_row(
            ProgressBar(total=self._steps, completed=step),
            f"step {step:,} of {self._steps:,}, {step / self._steps:.0%}",
            f"ETA {clock_text(left)}",
        )
        mfu = [] if last.get("mfu") is None else [f"MFU {last['mfu']:.1%}"]
        speed = [f"{figure(last, 'tokens_per_s', ',.0f')} tokens/s", *mfu]
        speed.append(f"bubble {figure(last, 'bubble_fraction', '.0%')}")
        facts = [*speed, f"slowest stage {last.get('slowest_stage')}", self._saved(step)]
        loss = f"loss {figure(last, 'loss', '.4f')}  "
        return Group(bar, Text(loss + curve(self._losses, columns - len(loss))), Text("  ".join(facts)))

    def _saved(self, step: int) -> str:
        """The newest checkpoint, and how many steps a crash now would lose."""
        checkpoint = checkpoint_of(self._run)
        if checkpoint is None:
            return "no checkpoint yet"
        lost = step - step_of(checkpoint)
        return f"saved {checkpoint.name}, {lost} step{'s' * (lost != 1)} ago"


_STARTING = {
    "starting": "joining, building stages",
    "warming up": "first messages on every connection",
    "loading": "loading weights",
    "loading kernels": "loading kernels, before the first step",
    "training": "in the first step",
}
