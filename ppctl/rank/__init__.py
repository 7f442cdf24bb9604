"""What one rank does, from its start to its end. `worker` is the program; the other files in the order of their use:

    own_process   its signals, limit of files, stdout and stderr
    times         how long each phase of the start took; whether the run's time is nearly over
    rendezvous    the ranks find each other and get the same run
    launcher      what a rank does itself, depending on who started it: watch the job, write status.json, print
    hang_dump     what it writes if the job hangs: stacks, torch's flight records
    watchdog      its own alarm, and on one rank of a node the watch over the job
    results       what rank 0 writes: metrics, durations of the start, the result
    failure       what a rank writes and prints when it fails

Connections are tried by `ppctl.reach`, training is `ppctl.train`.
"""
