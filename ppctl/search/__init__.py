"""The fastest configurations of a model on a number of GPUs, found by branch and bound over whole plans.

    space      what is searched: configurations as values, and which of them the rules allow
    bounds     the least seconds and bytes that any plan of a configuration, or of a set of them, can have
    branch     best first: sets are divided, single configurations are planned, until no bound beats what is known
    answer     what was found as data: rows, why other values were not taken, how sure the order is
    refine     the best ones again with searches for layout and schedule
    remaining  what a run goes on with where nodes are lost (decision 97)

Must not know torch, Hydra, processes or files.
"""
