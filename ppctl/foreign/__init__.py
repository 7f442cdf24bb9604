"""Causal language models of transformers, whose own code runs on every stage of a pipeline (decision 44).

    library        the only importer of transformers; overrides: fields of a config set to other values
    adapters       the only importer of peft (decision 56)
    anatomy        where a model can be cut; routers: what its routers record
    foreign_stage  a stage; stage_memory gives it memory, stored reads its weights
    proof          proves on a miniature that cutting changes no bit; small_model: a miniature with weights
    describe       what a child process tells the control path of a model; traits: its kinds of layers
    measure        what its layers keep and compute (decision 62): measured_pass, valueless, growth

`launch/described` starts `describe` for plans and `ppctl doctor --model`, and caches its answers.
"""
