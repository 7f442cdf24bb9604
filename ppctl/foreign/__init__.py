"""The cutter: every stage runs the whole forward of a module that ppctl has not made, and ends it at the cut.

    cut              where a module is cut, by a user's names or around layers of an anatomy
    cut_stage        a stage: modules beyond the cut become stand-ins
    cut_proof        proves on meta tensors that a user's module can be cut, and finds the messages
    fully_shard      the effects of torch's fully_shard on a stage: dtypes, and when gradients are summed

and for transformers' causal language models (decision 44), from which runs and `ppctl.pipeline` make stages:

    library          the only importer of transformers; sets fields of a config to other values
    peft_adapters    the only importer of peft (decision 56)
    anatomy          where a model can be cut
    foreign_stage    a stage with all that training asks of a stage; stored reads weights from a directory
    miniature_proof  proves on a miniature that cutting changes no bit
    describe         a child process that describes a model to the control path
    measure          the bytes and operations of its layers (decision 62), from single passes (measured_pass)

`launch/described` starts `describe` for plans, and caches its answers.
"""
