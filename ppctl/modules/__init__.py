"""A pipeline from Python: `ppctl.pipeline` cuts a user's module, or a model of transformers, and runs its stages.

`sources` are the two kinds of models in one form, `batch` is what a step reads and its loss, `pipeline_parts` makes
what a pipeline is of, with one error for all ranks (`pipeline_agreement`), `rank_stages` are what a rank has, `calls`
their programs for the engine, and `python_pipeline` runs its steps. `torch_schedule` runs stages that
torch.distributed.pipelining has made.
"""
