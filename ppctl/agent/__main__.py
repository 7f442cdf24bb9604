"""`python -m ppctl.agent` is the program `ppctl.agent.job`. No signal ends it, or is lost, while it imports."""

import signal
import sys
from importlib import import_module

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP))
    sys.exit(import_module("ppctl.agent.job").main())
