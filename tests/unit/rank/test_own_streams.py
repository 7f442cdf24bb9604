"""What a rank prints itself, without a launcher of ppctl's between it and the terminal."""

import subprocess
import sys

from ppctl.errors import CONTROL

SPOILT = "\x1b]0;x\x07\x9b31m\x7f\u202e\r"
PROGRAM = f"""
from ppctl.rank.own_process import lose_lines_rather_than_fail
lose_lines_rather_than_fail()
print({SPOILT!r} + "a line")
raise ValueError("of " + {SPOILT!r})
"""


def test_text_of_a_file_reaches_no_terminal_as_a_control_character() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False)
    for stream, text in ((done.stdout, "a line"), (done.stderr, "ValueError: of ")):
        shown = stream.decode().replace("\n", "")
        assert text in shown and "\\x1b]0;x\\x07" in shown
        assert not CONTROL.search(shown)
