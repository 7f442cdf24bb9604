"""The closed configuration: its schema, how it is composed from words, and how it is checked.

    schema       all keys, in groups: training_config, launch_config, model_parallel_config, pipeline_config
    metadata     facts about a field's key, such as its limit; keys reads them
    argv         words -> overrides; flags: the meaning of Megatron's flags; unknown_words
    translate    another system's file -> overrides: name_tables has the names, which are pages, other_systems what
                 several settings mean together
    compose      the road from words to a config: draft has its layers, mapping gives types, checks finds problems
    hydra_source the only importer of Hydra; yaml_file reads one file, resources finds it
    checks       limits, and the rules by subject: model_rules, parallel_rules, run_rules, precision, data_paths
    scale        miniatures of a config

Functions of the step: `batch_sizes` and `learning_rate`, and in `pieces` what is written for them. `moe_layer_freq`
says which layers have experts, `gpu_environment` what a rank on a GPU needs in its environment, `quantities` reads
times and amounts of memory.
"""
