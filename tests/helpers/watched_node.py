"""A node with one rank that hangs, watched as a worker's is, and without torch.

python watched_node.py RUN RANK HOSTS: HOSTS are the names of all nodes with commas between, RANK the place of this one.
It begins at a line on stdin. All wait for rank 0.
"""

import os
import signal
import sys
import time
from pathlib import Path

from ppctl.hang.progress import Limits
from ppctl.rank.watchdog import NodeWatch, write_stacks_on_request
from ppctl.runs.heartbeat import HeartbeatFile, Publisher
from ppctl.runs.rundir import RunDir

run, rank, hosts = RunDir(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3].split(",")
os.environ["SLURMD_NODENAME"] = hosts[rank]
signal.signal(signal.SIGUSR2, lambda *_: None)  # a rank's own follows, its flight records
write_stacks_on_request()
directory = Path(os.environ["DIRECTORY"])
beat = HeartbeatFile(directory, rank)
limits = Limits(start=60.0, first_step=float(os.environ["LIMIT"]), step=float(os.environ["LIMIT"]))
watch = NodeWatch(run, run.read_plan(), limits)
print("ready", flush=True)
sys.stdin.readline()
beat.set_state("updating" if rank else "training")
Publisher(directory, [rank], watch, limits.look).start()
watch.meet(hosts)
while True:
    time.sleep(60)
