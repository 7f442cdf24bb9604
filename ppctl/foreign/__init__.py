"""The cutter: a module that ppctl has not made runs its whole forward on every stage, and leaves it at the cut.

    cut              where a module is cut, by a user's names or around layers of an anatomy
    cut_stage        a stage: modules beyond the cut become stand-ins
    cut_proof        proves on meta tensors that a user's module can be cut, and finds the messages
    fully_shard      the effects of torch's fully_shard on a stage: dtypes, and when gradients are summed

and for causal language models of transformers (decision 44), from which runs and `ppctl.pipeline` make stages:

    library          the only importer of transformers; fields of a config set to other values
    peft_adapters    the only importer of peft (decision 56)
    anatomy          where a model can be cut
    foreign_stage    a stage with what training asks of it; stored reads its weights
    miniature_proof  proves on a miniature that cutting changes no bit
    describe         a child process that describes a model to the control path
    measure          the bytes and operations of its layers (decision 62), from single passes (measured_pass)

`launch/described` starts `describe` for plans, and caches its answers.
"""
