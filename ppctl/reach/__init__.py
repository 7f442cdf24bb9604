"""Tests before the first step whether the ranks of a job reach each other; a broken connection is PP-E707.

`start` runs three tests, in this order:

    call_roll    every rank has come and has the same run, and hosts reach those that they speak to (`hosts`)
    join_world   the ranks make the default process group
    warm_up      every channel and every group carries a first message (`first_contact`)

Before these, ranks find each other through a store, in which ppctl's values have proofs (`store`). `python -m
ppctl.reach.probe` measures messages between neighbours, for `ppctl doctor`, and tries a pipeline's transports.
"""
