"""`python -m ppctl.agent` is the program `ppctl.agent.job`. No signal ends it, or is lost, while it imports; none
changes the outcome once that is known."""

import signal
import sys
from importlib import import_module

if __name__ == "__main__":
    asks = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
    signal.pthread_sigmask(signal.SIG_BLOCK, asks)
    code = import_module("ppctl.agent.job").main()
    for number in asks:  # a handler of Python's is gone before the process is
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)
