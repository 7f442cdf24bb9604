"""One rank's process from its start to its end. `worker` is the program; the other files in the order of their use:

    standby       under agents: imports before it is known which rank it becomes
    own_process   its signals, limit of files, stdout and stderr
    rendezvous    the ranks find each other and get the same run
    watchdog      its own alarm, on one rank of a node the watch over the job, and the traces of a hang
    live_state    what it does now, how long each phase of the start took, whether the run's time is nearly over
    results       what it writes and prints: metrics, durations of the start, the result, or its failure

Connections are tried by `ppctl.reach`, training is `ppctl.train`.
"""
