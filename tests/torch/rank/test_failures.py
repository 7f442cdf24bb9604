"""What a rank writes of its own failure for whoever looks for the cause."""

from __future__ import annotations

from pathlib import Path

from ppctl.rank.results import fail
from ppctl.runs.rundir import RunDir

GLOO = (
    "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:33435: Connection reset by peer. This is typically "
    "caused by a remote worker hanging or bugs in the application. GLHF!"
)


def test_of_gloos_errors_the_fact_is_told_and_its_guesses_are_in_the_traceback(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert fail(RuntimeError(GLOO), run, 3, None, watched=True) == 1
    (failure,) = run.errors()
    assert failure.message == "Read error [127.0.0.1]:33435: Connection reset by peer"
    assert "GLHF!" in failure.traceback
