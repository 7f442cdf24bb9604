"""The commands: one module each, of the same name (`cancel` and `requeue`: `jobs`).

main       finds the command, prints problems, returns the exit code; console, table: output
overrides  KEY=VALUE arguments; `plan.planned` turns them into a plan
train      also has what resume, submit and parity share; live draws a run on a terminal
runs       also has what commands on a run share
reference  the text about codes and keys, for explain, completion and the documentation site
pipeline   the drawing of a pipeline; timeline: the file of a picture
*_text     what a command prints
"""
