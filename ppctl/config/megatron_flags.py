"""The flags of Megatron's `pretrain_gpt` that mean no key: why each is left out, and how its defaults differ.

Each table has a reason and the flags that it is about; a trailing `*` stands for all flags that begin so. A flag that
means a key is named at that key's field (`names`, `known_as`), or in `flags.py`. Must not know the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LATER = {
    "a warm-up that begins above 0, or a rate of their own for embedding and output": (
        "--lr-warmup-init --decoupled-lr --decoupled-min-lr"
    ),
    "a batch that grows by steps of its own, or shrinks to fit": (
        "--step-batch-size-schedule --decrease-batch-size-if-needed"
    ),
    "optimizers other than AdamW and Muon, and Muon of parts of matrices": (
        "--sgd-momentum --muon-* --lion-* --start-weight-decay --end-weight-decay "
        "--weight-decay-incr-style --no-weight-decay-cond-type --apply-wd-to-qk-layernorm"
    ),
    "an optimizer whose state is in other dtypes, or in host memory": (
        "--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --optimizer-cuda-graph "
        "--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype "
        "--grad-reduce-in-bf16"
    ),
    "sums of gradients and gathering of weights behind computation": (
        "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step"
    ),
    "several ways to share out a data-parallel group at once": (
        "--outer-dp-sharding-strategy --enable-full-sharding-in-hsdp --num-distributed-optimizer-instances "
        "--torch-fsdp2-no-reshard-after-forward"
    ),
    "attention over a window, with sinks, or of another kind": (
        "--window-size --window-attn-skip-freq --softmax-type --attention-output-gate --experimental-attention-variant "
        "--dsa-* --linear-* --no-dsa-* --disable-dsa-* --qk-clip* --qk-l2-norm --no-rope-freq --cache-mla-latents "
        "--mla-down-proj-fusion --apply-query-key-layer-scaling"
    ),
    "positions of other kinds": (
        "--rope-type --rotary-seq-len-interpolation-factor --no-position-embedding --relative-attention-num-buckets "
        "--relative-attention-max-distance --mrope-section --yarn-correction-range-round-to-int "
        "--no-yarn-correction-range-round-to-int"
    ),
    "other shapes of blocks": (
        "--squared-relu --quick-geglu --glu-linear-offset --activation-func-clamp-value --apply-layernorm-1p "
        "--apply-residual-connection-post-layernorm --fp32-residual-connection --use-fused-weighted-squared-relu "
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json --spec --yaml-cfg "
        "--enable-mhc-connections --mhc-* --embedding-init-method-std --init-method-xavier-uniform"
    ),
    "widths with rates of their own (muP)": "--use-mup --mup-*",
    "layers with a state (Mamba)": (
        "--hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model --mamba-* --disable-mamba-mem-eff-path "
        "--gdp-*"
    ),
    "multi-token prediction of other shapes": (
        "--mtp-standalone --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm --mtp-hybrid-override-pattern"
    ),
    "experts with a capacity, of other shapes, or routed by other rules": (
        "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy "
        "--moe-expert-rank-capacity-factor --moe-input-jitter-eps --moe-latent-size --moe-shared-expert-gate "
        "--moe-apply-probs-on-input --moe-router-force-load-balancing --moe-router-force-biased "
        "--moe-router-quantile-balancing-ema --moe-enable-routing-replay --moe-use-upcycling "
        "--moe-upcycling-granularity"
    ),
    "messages of experts beside other work, or in 8 bits": (
        "--moe-shared-expert-overlap --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype --ep-overlap-* "
        "--overlap-dispatch-backward-with-experts-wgrad"
    ),
    "sequences that are packed to ranks by their length": (
        "--max-seqlen-per-dp-cp-rank --hybrid-context-parallel --dataloader-inter-document-masking"
    ),
    "weights of layers shared out within tensor parallelism": (
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*"
    ),
    "other ways to train in 8 or 4 bits": (
        "--fp8-param-gather --fp4-param-gather --te-precision-config-file --fp8-quantizer-factory --fp8-margin "
        "--fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo --no-fp8-wgrad --disable-fp8-wgrad "
        "--fp8-output-proj --first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 "
        "--fp4-* --use-kitchen-attention --kitchen-* --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache "
        "--moe-router-padding-for-quantization --moe-router-padding-for-fp8"
    ),
    "activations in host memory": (
        "--cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading --offload-modules "
        "--min-offloaded-tensor-size --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks "
        "--activation-offload-fraction --fine-grained-offloading-max-inflight-offloads --moe-paged-stash*"
    ),
    "recomputation whose inputs are divided over ranks": "--distribute-saved-activations",
    "steps captured as CUDA graphs": (
        "--cuda-graph-* --enable-cuda-graph --external-cuda-graph --moe-pad-experts-for-cuda-graph-inference"
    ),
    "profiles of single steps by these flags (log.torch_profile=10:12 makes torch's)": (
        "--profile --profile-step-start --profile-step-end --use-pytorch-profiler --pytorch-profiler-* "
        "--profile-ranks --record-memory-history --memory-snapshot-path --record-shapes --nvtx-ranges"
    ),
    "checkpoints that are written or kept by other rules": (
        "--async-strategy --async-ckpt-* --use-persistent-ckpt-worker --save-retain-interval "
        "--persistent-save-interval --non-persistent-* --no-save-optim --replication --replication-jump "
        "--replication-factor"
    ),
    "a run that is restarted in its processes": "--inprocess-* --enable-ft-package --calc-ft-timeouts --ft-*",
    "an end at another step than train.steps, and steps left out": "--exit-interval --iterations-to-skip --skip-train",
    "an evaluation with a batch or a start of its own, or of several sets": (
        "--start-eval-at-iter --eval-global-batch-size --eval-micro-batch-size --full-validation "
        "--multiple-validation-sets --validation-set-names"
    ),
    "data with holes (fill in the middle), mixed by phases, or listed in files": (
        "--fim-* --phase-transition-iterations --data-args-path --per-split-data-args-path "
        "--per-dataset-sequences-path --sample-rate"
    ),
    "learning from another model's words": "--logits-*",
    "reinforcement learning": "--perform-rl-step --rl-* --grpo-* --langrl-env-config --refit-method",
    "training of a part of the weights": "--freeze-all-layers",
    "stopping at a loss that jumps": "--check-for-spiky-loss --check-for-large-grads",
}
"""A feature that this release does not have -> the flags that ask for it."""

MEANINGLESS = {
    "ppctl has one implementation of its model": (
        "--use-mcore-models --transformer-impl --enable-experimental --use-transformer-engine-op-fuser "
        "--use-te-activation-func --batch-invariant-mode --batch-invariant-backend"
    ),
    "model.num_query_groups alone decides it": "--group-query-attention",
    "model.attention_backend alone decides which kernel computes attention": (
        "--use-flash-attn --attention-softmax-in-fp32 --no-masked-softmax-fusion --flash-attention-version"
    ),
    "the device decides which kernels compute": (
        "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        "--no-persist-layer-norm --fused-residual-rmsnorm --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion "
        "--moe-use-grouped-tensor --moe-single-grouped-* --use-grouped-gemm-for-* --moe-*-glu-interleave-size "
        "--disable-bf16-reduced-precision-matmul --disable-jit-fuser --mlp-chunks-for-* "
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding"
    ),
    "how experts' rows are sent changes no number": (
        "--moe-token-dispatcher-type --moe-enable-deepep --moe-flex-dispatcher-* --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-* --moe-deepep-num-sms --moe-ncclep-zero-copy --high-priority-a2a-comm-stream"
    ),
    "GELU is computed in its form with tanh": "--openai-gelu --onnx-safe",
    "the router, the loss and sums of gradients are in float32 (float64 in a model of float64)": (
        "--moe-router-dtype --accumulate-allreduce-grads-in-fp32 --fp16-lm-cross-entropy --output-logit-dtype"
    ),
    "the loss is a mean over all tokens of the global batch": "--calculate-per-token-loss",
    "train.nonfinite decides": "--no-check-for-nan-in-loss-and-grad",
    "initial weights are drawn by name, equal on all devices": (
        "--no-initialization --init-model-with-meta-device --data-parallel-random-init --te-rng-tracker "
        "--inference-rng-tracker"
    ),
    "data.tokenizer alone decides it, a directory with a tokenizer.json": (
        "--tokenizer-type --vocab-file --merge-file --vocab-extra-ids --tokenizer-metadata --tokenizer-special-tokens "
        "--tiktoken-* --tokenizer-sentencepiece-legacy --no-tokenizer-* --disable-tokenizer-* --tokenizer-hf-* "
        "--trust-remote-code --null-tokenizer-* --use-gigatoken --allow-ambiguous-pad-tokens"
    ),
    "model.make_vocab_size_divisible_by is 1 unless it is set": "--no-pad-vocab-size --disable-pad-vocab-size",
    "samples are mapped from files and drawn by (seed, step) alone, in the ranks themselves": (
        "--num-workers --dataloader-type --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--data-cache-path --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-dataset-builder-threads "
        "--object-storage-cache-path --mid-level-dataset-surplus --enable-msc --disable-msc --no-data-sharding"
    ),
    "training reads no test data": "--test-data-path --test-mode",
    "the device decides: nccl on cuda, gloo on cpu": (
        "--distributed-backend --disable-gloo-process-groups --fake-process-group"
    ),
    "how gradients are put into buckets is ppctl's own": (
        "--ddp-* --no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather "
        "--no-gradient-reduce-div-fusion --suggested-communication-unit-size --no-use-layer-wise-param-layout "
        "--dump-param-to-param-group-map"
    ),
    "parallel.data_parallel_sharding alone decides": ("--use-megatron-fsdp --megatron-fsdp-* --fsdp-*"),
    "launch.env sets NCCL's variables": (
        "--use-nccl-ub --disable-symmetric-registration --create-all-gather-group --use-sharp --sharp-enabled-group "
        "--nccl-communicator-config-path --high-priority-stream-groups --symmetric-ar-type"
    ),
    "ranks that ppctl does not start find it in their environment": (
        "--node-rank --rdzv-backend --rdzv-endpoint --local-rank --lazy-mpu-init"
    ),
    "there is one format of checkpoints, which any cut reads": (
        "--ckpt-format --auto-detect-ckpt-format --ckpt-convert-* --use-dist-ckpt --dist-ckpt-* "
        "--ckpt-fully-parallel-* --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure --ckpt-pg-* "
        "--ckpt-drop-redundant-extra-state --no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load "
        "--disable-strict-fsdp-dtensor-load --distrib-optim-fully-reshardable-mem-efficient "
        "--load-main-params-from-ckpt --verify-integrity --no-save-tokenizer-assets --disable-save-tokenizer-assets"
    ),
    "a checkpoint holds no state of random generators": "--no-save-rng --no-load-rng",
    "a run's config is in its directory, and `ppctl resume RUN` reads it": (
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args --override-opt_param-scheduler "
        "--override-opt-param-scheduler --use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler "
        "--config-logger-dir"
    ),
    "SIGTERM always saves before a run ends": "--exit-signal-handler* --exit-signal --adlr-autoresume*",
    "a line has all figures, in metrics.jsonl and on the screen; log.interval says how often": (
        "--log-* --no-log-* --disable-log-* --timing-log-* --tensorboard-log-interval --tensorboard-queue-size "
        "--logging-level --moe-per-layer-logging --no-barrier-with-level-1-timing --train-sync-interval"
    ),
    "log.name and log.dir name a run for Weights & Biases, and its own variables the rest": (
        "--wandb-exp-name --wandb-save-dir --wandb-entity"
    ),
    "nothing is reported to services": "--no-one-logger --one-logger-* --app-tag-* --otel-*",
    "what holds a job up is found by heartbeats, and train.check_replicas compares copies": (
        "--gpu-sniff-test-interval --straggler-* --disable-straggler-on-startup --run-workload-inspector-server "
        "--flight-recorder-* --no-flight-recorder-* --disable-flight-recorder-* "
        "--distributed-timeout-seconds-after-init"
    ),
    "nothing is injected or run again to look for faulty devices": (
        "--error-injection-* --rerun-mode --result-rejected-tracker-filename --fault-injector-*"
    ),
    "Python and torch decide when they collect memory": (
        "--manual-gc* --no-manual-gc-eval --disable-manual-gc-eval --empty-unused-memory-level"
    ),
    "what it switches off or tunes needs Transformer Engine's userbuffers, which ppctl does not use": (
        "--no-tp-comm-* --disable-tp-comm-* --tp-comm-overlap-cfg"
    ),
    "records of single tensors are not written": (
        "--save-params-interval --save-activations-interval --save-tokens-per-expert-interval --save-wgrads-interval "
        "--save-dgrads-interval --moe-routing-trace-*"
    ),
    "it is about inference, which training does not do": (
        "--inference-* --max-tokens-to-oom --use-legacy-static-engine --decode-only-cuda-graphs "
        "--enable-chunked-prefill --num-speculative-tokens --use-same-sampling-seed-across-dp-ranks --flash-decode "
        "--nccl-all-reduce-for-prefill"
    ),
    "it is about encoders and retrieval (BERT, T5, ICT), and ppctl trains decoders": (
        "--decoder-num-layers --decoder-seq-length --bert-* --output-bert-embeddings --mask-prob --short-seq-prob "
        "--ict-* --biencoder-* --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path "
        "--retriever-* --block-data-path --embedding-path --indexer-*"
    ),
    "it is about images, and ppctl trains on text": (
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction "
        "--head-lr-mult --vision-* --swin-backbone-type --mask-type --mask-factor --iter-per-epoch --dino-*"
    ),
}
"""Why nothing follows from a flag here -> the flags."""

WRITE = {
    "optim.warmup_steps": "--lr-warmup-fraction --warmup",
    "model.vocab_size": "--padded-vocab-size",
    "model.from": "--finetune --no-load-optim --pretrained-checkpoint",
    "checkpoint.resume": "--exit-on-missing-checkpoint --ckpt-step --override-ckpt-iteration",
}
"""The key by which something like it is said, in other terms -> the flags."""


SEVERAL = (
    "--cuda-graph-scope --cuda-graph-modules --gtp-remat-opt-in-modules --mrope-section --offload-modules "
    "--rl-inference-parsers --profile-ranks --iterations-to-skip --high-priority-stream-groups "
    "--ddp-param-name-patterns-for-fp32-local-accumulation --validation-set-names --tokenizer-special-tokens "
    "--test-data-path --retriever-report-topk-accuracies --spec"
)
"""The flags above that take one value or more."""


def found_in(table: dict[str, str], flag: str) -> str | None:
    """The entry of one of the tables that lists `flag`, by name or by how it begins."""
    return next((entry for entry, flags in table.items() if any(_means(name, flag) for name in flags.split())), None)


def _means(name: str, flag: str) -> bool:
    head, star, tail = name.partition("*")
    return flag.startswith(head) and flag.endswith(tail) and len(flag) >= len(head + tail) if star else flag == name


class Default(NamedTuple):
    """A default of Megatron's that is not ppctl's."""

    key: str
    theirs: Any
    """The value, or a function that makes it of the keys and values that are set."""
    where: str = ""
    """A key that has to be set for the default to matter."""


def _feed_forward(given: Mapping[str, str]) -> int | None:
    """Four times the width; with a gate two thirds of it, rounded down to a multiple of 64."""
    width = given["model.hidden_size"]
    if not width.isdigit():
        return None
    gated = given.get("model.gated_linear_unit") == "true"
    return int(4 * int(width) * 2 / 3) // 64 * 64 if gated else 4 * int(width)


DEFAULTS = (
    Default("model.ffn_hidden_size", _feed_forward, "model.hidden_size"),
    Default("model.make_vocab_size_divisible_by", 128),
    Default("model.hidden_dropout", 0.1),
    Default("model.attention_dropout", 0.1),
    Default("model.normalization", "LayerNorm"),
    Default("model.position_embedding_type", "learned_absolute"),
    Default("model.gated_linear_unit", False),
    Default("model.add_bias_linear", True),
    Default("model.share_embeddings_and_output_weights", True),
    Default("model.kv_lora_rank", 32, "model.multi_latent_attention"),
    Default("model.rotary_scaling_factor", 8, "model.rotary_scaling_type"),
    Default("optim.lr_decay_style", "linear"),
    Default("optim.beta2", 0.999),
    Default("optim.weight_decay", 0.01),
    Default("data.validation_split", 0.03, "data.path"),
    Default("train.eval_steps", 100, "train.eval_interval"),
    Default("checkpoint.keep", 0),
)
"""Megatron's defaults of keys with the same meaning. Source: Megatron-LM's argument parser, August 2026."""


def defaults_left(given: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(key, Megatron's default) of the keys that a command line with the values `given` leaves at another default."""
    for key, theirs, where in DEFAULTS:
        if key not in given and (not where or where in given):
            value = theirs(given) if callable(theirs) else theirs
            if value is not None:
                yield key, value
