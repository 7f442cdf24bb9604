"""A pipeline from Python: `ppctl.pipeline` cuts a user's module, or a transformers model, and runs its stages.

`sources` has the two kinds of models in one form, `batch` a step's input and loss, `pipeline_parts` makes the parts of
a pipeline, with one error for all ranks (`pipeline_agreement`), `rank_stages` has a rank's stages, `calls` their
programs for the engine, and `python_pipeline` runs steps. `torch_schedule` runs stages of torch.distributed.pipelining.
"""
