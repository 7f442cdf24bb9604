"""The fastest configurations of a model on a number of GPUs, found by branch and bound over whole plans.

    space      the search space: configurations as values, and which of them the rules allow
    bounds     the least seconds and bytes that any plan of a configuration, or of a set of them, can have
    branch     best first: sets are divided, single configurations are planned, until no bound beats the best plan
    answer     the results as data: rows, why other values were not taken, how certain the order is
    refine     plans the best again with searches for layout and schedule
    remaining  the configuration after nodes are lost (decision 97)

Must not know torch, Hydra, processes or files.
"""
