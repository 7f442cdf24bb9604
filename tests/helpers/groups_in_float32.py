"""The scaled grouped product of a GPU, on a CPU: what trains there goes group by group instead."""

import torch

from ppctl.model.fp8 import Quantised
from ppctl.model.linear import multiply_in_float32


def multiply_groups_in_float32(a, of_a, b, of_b, ends):
    """`MultiplyGroups` as the CPU has it: group by group, by `multiply_in_float32`. What is after the ends is NaN."""
    ends = ends.tolist()
    runs = [slice(*each) for each in zip([0, *ends], ends)]  # noqa: B905  one shorter
    assert all(len(range(len(a) + a.shape[1])[run]) % 16 == 0 and run.start < run.stop for run in runs)
    if b.dim() == 3:
        own = [Quantised(a[run], of_a[run, None], (1, 0), a[run].shape) for run in runs]
        weights = [
            Quantised(values, scales[:, None], (1, 0), values.shape) for values, scales in zip(b, of_b, strict=True)
        ]
        out = torch.full((len(a), b.shape[1]), torch.nan, dtype=torch.bfloat16)
        out[: ends[-1]] = torch.cat(list(map(multiply_in_float32, own, weights)))
        return out
    scaled = [
        [
            Quantised(each[:, run].contiguous(), scale[:, None], (1, 0), each[:, run].shape)
            for run, scale in zip(runs, of, strict=True)
        ]
        for each, of in ((a, of_a.view(len(runs), -1)), (b, of_b.view(len(runs), -1)))
    ]
    return torch.stack(list(map(multiply_in_float32, *scaled))).bfloat16()
