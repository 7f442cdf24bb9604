"""The commands: one module each, of its name (`cancel`, `requeue`: `jobs`; `runs`: `runs_command`).

main       finds the command, sorts its words, prints problems, returns the exit code; console: output
local_run  from an accepted plan to the end of a run: the steps of train, resume, submit and parity
runs       what commands on a run share; longer: its learning rate with another length
sweep      several runs of one command line, for train and submit; comparison: runs side by side
live       draws a run on a terminal
explain    also has the text about codes and keys for completion and the documentation site
timeline   the file of a picture; pipeline_drawing: the table of a pipeline's ranks and chunks
*_text     the text that a command prints

A command with the name of another package or module shows what that one makes: `plan` and `layout` what the packages
make, `parity` what `plan/parity.py` makes; `runs` uses `ppctl/runs/finding.py`, `simulate` and `trace` use `schedule/`.
"""
