"""What one process reads of a run's data: for the reference, and for whoever else computes without ranks."""

from ppctl.config.pieces import read_rampup
from ppctl.config.schema import RunConfig
from ppctl.data.batches import Batches
from ppctl.data.load import load_data


def whole_batches(config: RunConfig) -> Batches:
    """The config's batches, undivided."""
    data, train = load_data(config.data), config.train
    return Batches(
        data.training,
        seq_length=config.data.seq_length,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        seed=train.seed,
        vocab_size=config.model.vocab_size,
        end=data.end,
        rampup=None if train.batch_rampup is None else read_rampup(train.batch_rampup),
    )


def microbatches(config: RunConfig, steps: int) -> list[list[tuple]]:
    """`[step][mb] = (tokens, labels, mask)` of the first `steps` steps."""
    read = map(whole_batches(config).step, range(steps))
    return [list(zip(b.tokens, b.labels, b.loss_mask, strict=True)) for b in read]
