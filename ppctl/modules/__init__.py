"""A pipeline from Python: `ppctl.pipeline` cuts a user's module, or a model of transformers, and runs its stages.

`names` says which modules are on which stage, `own_stage` is one stage of a user's module, `survey` proves that it can
be cut, `sources` gives both kinds of models one form, `sync` and `dtypes` are for sharded stages; `batch` and `loss`
are what a step reads and ends in, `build` makes what a pipeline is of, with one error for all ranks, `stages` are what
a rank has, `calls` their programs for the engine, and `pipeline` runs its steps.
"""
