"""The closed configuration: its schema, how it is composed and checked.

    schema       all keys, in groups: model_config, training_config, launch_config, model_parallel_config and
                 pipeline_config
    metadata     what a field knows of its key; keys reads it, limits bounds its value
    argv         the command line as KEY=VALUE with full names; flags, megatron_flags, quoting, unknown_words
    compose      defaults, conf/, recipe and command line become one draft, and mapping gives it types
    hydra_source the only importer of Hydra; yaml_file reads one file, resources finds it, outside_values fills it
    checks       rules on values, and support; further rules by subject in *_rules, precision, data_paths
    scale        miniatures of a config

Functions of the step, and what is written for them: `batch_sizes` (`batch_rampup`), `learning_rate` (`lr_pieces`) and
`mtp_weight` (`mtp_pieces`). `moe_layer_freq` says which layers have experts, `gpu_environment` what a rank on a GPU
needs in its environment, `quantities` reads times and amounts of memory.
"""
