"""A pipeline from Python: `ppctl.pipeline` cuts a user's module, or a transformers model, and runs its stages.

`sources` gives the two kinds of models one interface, `batch` has a step's input and loss, `pipeline_parts` makes the
parts of a pipeline, with one error for all ranks (`pipeline_agreement`), `rank_stages` has a rank's stages, `calls` has
their programs for the engine, `python_pipeline` runs steps. `torch_schedule` runs stages of torch's own pipelining.
"""
