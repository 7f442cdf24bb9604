"""Whether the ranks of a job reach each other: tried before the first step, and what is dead is named (PP-E707).

`start` is this room's door, with its three trials in their order:

    call_roll    every rank has come and has the same run, and every host reaches every other one (`roll_call`, `hosts`)
    join_world   the ranks make the default process group
    warm_up      every channel and every group carries a first message (`first_contact`)

`python -m ppctl.reach.probe` measures messages between neighbours, for `ppctl doctor`.
"""
