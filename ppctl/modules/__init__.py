"""A pipeline from Python: `ppctl.pipeline` cuts a user's module, or a model of transformers, and runs its stages.

`names` says which modules are on which stage, `own_stage` runs one stage of a user's module, `survey` proves that it can
be cut, `build` makes the stages of a rank, `batch` and `loss` are what a step reads and ends in, `pipeline` runs steps.
"""
