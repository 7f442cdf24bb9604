"""A stranger at a rendezvous store, as a process of another user: python stranger_at_store.py HOST PORT UID

Writes the address of a socket of his own under every key where ranks look for something, until he is ended; prints a
line for whoever connects to it. Reads nothing, and harms only the store that he is given.
"""

import encodings.idna  # noqa: F401  an interpreter under /root cannot be read any more later
import os
import select
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore

host, port, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
NAME = f"stranger-{os.getpid()}"
KEYS = [f"ppctl/start/1//{key}" for key in ("checkpoint writer 0", "ppctl/roll/rank/1", "ppctl/node/of/0")]
trap = socket.socket(socket.AF_UNIX)
trap.bind(f"\0{NAME}")
trap.listen()
print("there", flush=True)
for _ in range(3000):  # torch itself waits longer and longer between its tries
    with suppress(OSError), socket.create_connection((host, port), 0.2):
        break
    time.sleep(0.02)
store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
while True:
    for key in KEYS:
        store.set(key, NAME)
    if select.select([trap], [], [], 0.005)[0]:
        connected, _ = trap.accept()
        print("caught", flush=True)
