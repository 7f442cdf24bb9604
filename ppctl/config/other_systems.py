"""Settings of torchtitan and NeMo Automodel that must be read together: model, replicas, batch, stages, rate.

Sources: torchtitan `b5bcd76c` and `238fa995` (the last with TOML), Automodel `36044ad3`; their functions are named in
`tests/unit/config/test_other_configs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ppctl.config.argv import LAYOUT
from ppctl.config.keys import value_text
from ppctl.config.metadata import MOST_STAGES
from ppctl.config.name_tables import AUTOMODEL, MODELS, SIZES, TORCHTITAN, NameTables, overrides_of
from ppctl.config.pipeline_config import calculate_virtual_stages
from ppctl.config.resources import conf_directory
from ppctl.config.yaml_file import YamlFile
from ppctl.errors import ConfigError, Problem
from ppctl.layout.letters import canonical_text

DP, STYLE = "parallel.data_parallel_size", "optim.lr_decay_style"
OF_THE_MODEL = ("model", "model.from", "model.num_layers", "recipe")
"""Keys with which a command line chooses the model, whatever a file says."""
LATER, NOTHING, NO_MODEL = "PP-E108", "PP-E109", "PP-E104"
"""Codes: not in this release; no meaning here; the model must be typed before anything can be planned."""

_SINGLE = ("1f1b", "gpipe")
"""Schedules with one stage per rank; under others a rank has two, unless a file says how many layers a stage has."""
_NO_RANKS = "the launcher knows the number of ranks: as few replicas as possible, unless dp=N or nodes=N is typed"


class Said(NamedTuple):
    """The meaning of some settings: overrides with a remark, or why there are none."""

    names: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...] = ()
    why: str = ""
    code: str = "PP-E107"


@dataclass(frozen=True)
class Given:
    """The settings of a file by name, and the values of the command line."""

    values: Mapping[str, Any]
    typed: Mapping[str, str]
    """Key -> text."""
    num_layers: int | None
    """Decoder layers of the model that the command line names, if it does."""
    tables: NameTables

    def get(self, name: str, default: Any = None) -> Any:
        """A setting's value; `default` where it is not given, null or `none`."""
        value = self.values.get(name)
        return default if value in (None, "none", "") else value

    def count(self, name: str, default: int) -> int:
        """A setting that is a whole number. Raises ConfigError (PP-E115)."""
        value = self.get(name, default)
        if type(value) is not int or not -1 <= value < 2**53:
            raise ConfigError(Problem("PP-E115", f"{name} is {value!r}, but must be a whole number", place=name))
        return value

    def size(self, key: str, otherwise: int) -> int:
        """The typed value of a key that is a size; `otherwise` if none is typed."""
        text = self.typed.get(key, "")
        return int(text) if text.isdigit() else otherwise

    def some(self, *names: str) -> tuple[str, ...]:
        """The names that the file sets; if it sets none, the first."""
        return tuple(name for name in names if name in self.values) or names[:1]

    @property
    def names(self) -> Mapping[str, str]:
        """A size that torchtitan and Automodel both have -> its name in the file's system."""
        return self.tables.entries[SIZES]

    @property
    def names_model(self) -> bool:
        """Whether the command line chooses the model."""
        return any(key in self.typed for key in OF_THE_MODEL)


def _model(given: Given, names: Sequence[str]) -> tuple[Said, int | None]:
    """(the model that these settings mean, its number of layers)."""
    if given.names_model:
        return Said(given.some(*names), (), "the command line says which model it is", NOTHING), given.num_layers
    named = "/".join(str(given.get(name)) for name in given.some(*names))
    entry = given.tables.entry(MODELS, named)
    if entry is None:
        why = f"no table has the sizes of {named}: type model.from=DIR or model=NAME"
        return Said(given.some(*names), (), why, NO_MODEL), None
    overrides = dict(overrides_of(entry, ""))
    layers = overrides.get("model.num_layers")
    if layers is None:
        file = f"{overrides['model']}.yaml"
        layers = YamlFile(conf_directory() / "model" / file, f"conf/model/{file}").values["num_layers"]
    return Said(given.some(*names), tuple(overrides.items())), int(layers)


def _sizes(given: Given, replicas: int, experts: int) -> tuple[int, int, str]:
    """(pp, the data-parallel size, a remark). A data-parallel size that neither command line nor file gives is the
    smallest that a group of experts fits in."""
    keys = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}
    tp, cp, pp = (
        max(given.size(f"parallel.{key}_parallel_size", given.count(given.names[axis], 1)), 1)
        for axis, key in keys.items()
    )
    world = given.size("launch.nodes", 0) * given.size("launch.gpus_per_node", 0)
    known = given.size(DP, 0) or world // (tp * cp * pp) or replicas
    return (pp, known, "") if known else (pp, -(-experts // (tp * cp)), _NO_RANKS)


def _batch(given: Given, pp: int, dp: int, usual: tuple[int, int]) -> Said:
    """The batch: a schedule call takes a replica's local batch, in microbatches if there is a pipeline; a global batch
    of -1 is one call of every replica."""
    names = [given.names[each] for each in ("local", "global", "micro")]
    local, total = given.count(names[0], usual[0]), given.count(names[1], usual[1])
    values = [("train.global_batch_size", str(total if total > 0 else local * dp))]
    values += [("train.micro_batch_size", str(given.count(names[2], 1) if pp > 1 else local))]
    return Said(given.some(*names), (*values, *[("pipeline.pp_batch_size", str(local))] * (pp > 1)))


def _stages(given: Given, pp: int, layers: int | None, more: Mapping[str, int]) -> Said:
    """The schedule and a layout. `more` maps further settings to defaults: how many layers the embedding and the output
    count as, and, with default 0, a rounding. Left-over layers go to the first stages."""
    names = [given.names[each] for each in ("schedule", "layers_per_stage", "parts")]
    used = given.some(*names, *more)
    if pp == 1:
        return Said(used, (), "there is no pipeline parallelism", NOTHING)
    schedule = str(given.get(names[0], "1F1B")).lower()
    values = [] if given.get(f"{names[0]}_csv") else [("pipeline.pp_schedule", schedule)]
    first, last = [given.count(name, usual) for name, usual in more.items() if usual] or (0, 0)
    rounding = next((given.get(name) for name, usual in more.items() if not usual), None)
    if (parts := given.get(names[2])) is not None:
        counts = [sum("layers." in str(each) for each in part) for part in parts]
    elif layers is None:
        return Said(used, tuple(values), "the stages follow from the layers of the model, which has to be typed")
    else:
        weight, per_stage = layers + first + last, given.get(names[1])
        if max(pp, weight) > MOST_STAGES:
            return Said(used, tuple(values), "there are more stages or layers than a plan holds")
        stages, _ = calculate_virtual_stages(weight, per_stage, pp, schedule in _SINGLE, rounding)
        counts = [weight // stages + (stage < weight % stages) for stage in range(stages)]
        counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    letters = ["t" * count for count in counts]
    letters[0], letters[-1] = f"E{letters[0]}", f"{letters[-1]}L"
    return Said(used, (*values, (LAYOUT, canonical_text(letters))))


def torchtitan(given: Given) -> Iterator[Said]:
    """torchtitan's settings that belong together."""
    section = "model" if "model.name" in given.values else "model_spec"
    said, layers = _model(given, [f"{section}.name", f"{section}.flavor"])
    yield said
    etp = given.count("parallelism.expert_tensor_parallel_degree", 1)
    ep = given.count(given.names["ep"], 1)
    names = ("parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree")
    shard, replicate = given.count(names[0], -1), given.count(names[1], 1)
    pp, dp, why = _sizes(given, max(shard * replicate, 0), ep * etp)
    if replicate > 1 and shard != 1:
        why = "weights that are replicated over groups and shared out within them"
        yield Said(given.some(*names), (), why, LATER)
    else:
        sharding = ("parallel.data_parallel_sharding", "none" if shard == 1 else "full")
        yield Said(given.some(*names), (sharding, (DP, str(dp))), why)
    splits = given.size("parallel.tensor_model_parallel_size", given.count(given.names["tp"], 1)) > 1
    halves = splits and given.values.get("parallelism.enable_sequence_parallel", True) is not False
    yield Said(("parallelism.enable_sequence_parallel",), (("parallel.sequence_parallel", value_text(halves)),))
    in_experts = (("parallel.expert_tensor_parallel_size", str(etp)),) if ep > 1 else ()
    yield Said(("parallelism.expert_tensor_parallel_degree",), in_experts, "" if ep > 1 else "ep is 1", NOTHING)
    ends = dict.fromkeys((f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")), 1)
    yield _titan_batch(given, pp, dp)
    yield _stages(given, pp, layers, ends)
    yield _titan_rate(given)
    compiles = given.get("compile.enable") is True and "model" in given.get("compile.components", ["model"])
    yield Said(given.some("compile.enable", "compile.components"), (("train.compile", value_text(compiles)),))


def _titan_batch(given: Given, pp: int, dp: int) -> Said:
    """The batch, which is given in samples, or in newer configs in tokens."""
    tokens, total = (f"training.num_tokens_per_{name}" for name in ("microbatch_per_dp_rank", "train_step"))
    if tokens not in given.values:
        return _batch(given, pp, dp, (8, -1))
    number, length = "parallelism.num_pp_microbatches", given.count("training.max_context_length", 2048)
    micro, rest = divmod(given.count(tokens, 1), length)
    steps, more = divmod(max(given.count(total, -1), 0), length)
    if rest or more:
        why = f"a batch in tokens that is no whole number of samples of {length} tokens"
        return Said(given.some(tokens, total, number), (), why, LATER)
    values = {given.names["local"]: micro * (given.count(number, 1) if pp > 1 else 1), given.names["micro"]: micro}
    said = _batch(replace(given, values=values), pp, dp, (8, steps or -1))
    return said._replace(names=given.some(tokens, total, number))


def _titan_rate(given: Given) -> Said:
    fields = ("decay_type", "decay_ratio", "total_steps", "warmup_steps", "min_lr_factor")
    names = [f"lr_scheduler.{each}" for each in fields]
    kind, ratio, total = str(given.get(names[0], "linear")), given.get(names[1]), given.count(names[2], 0)
    steps = total or given.count("training.steps", 10000)
    warmup = min(given.count(names[3], 200), steps)
    pairs = [("optim.warmup_steps", str(warmup)), (STYLE, kind)]
    if ratio is not None or kind == "sqrt":
        decay = steps - warmup if ratio is None else min(round(steps * float(ratio)), steps - warmup)
        pairs[1:] = [(STYLE, "WSD"), ("optim.lr_wsd_decay_style", "minus_sqrt" if kind == "sqrt" else kind)]
        pairs += [("optim.lr_wsd_decay_steps", str(max(decay, 1)))]
    pairs += [("optim.lr_decay_steps", str(total))] if total else []
    rates = (given.get(name) for name in ("optimizer.param_groups.0.optimizer_kwargs.lr", "optimizer.lr"))
    rate = next((float(each) for each in rates if each), 8e-4)
    return Said(given.some(*names), (*pairs, ("optim.min_lr", f"{rate * float(given.get(names[4], 0)):g}")))


def automodel(given: Given) -> Iterator[Said]:
    """Automodel's settings that belong together."""
    ways = ("pretrained_model_name_or_path", "config.pretrained_model_name_or_path", "config.name_or_path")
    said, layers = _model(given, given.some(*(f"model.{way}" for way in ways))[:1])
    yield said
    # groups of experts are within dp x cp
    experts = given.count(given.names["ep"], 1) * given.count(given.names["tp"], 1)
    pp, dp, why = _sizes(given, given.count("distributed.dp_size", 0), experts)
    yield Said(("distributed.dp_size",), ((DP, str(dp)),), why)
    yield _batch(given, pp, dp, (1, 32))
    yield _stages(given, pp, layers, {"distributed.pipeline.round_virtual_stages_to_pp_multiple": 0})
    if given.get("optimizer._target_") == "torch.optim.Adam" and given.get("optimizer.weight_decay", 0):
        yield Said(("optimizer._target_",), (), "Adam, whose weight decay is a part of the gradient", LATER)
    yield _nemo_rate(given)
    lengths = given.some("packed_sequence.packed_sequence_size", "dataset.seq_length", "dataset.seq_len")
    if length := next((given.count(name, 0) for name in lengths if given.count(name, 0)), 0):
        yield Said(lengths, (("data.seq_length", str(length)),))
    elif "data.seq_length" not in given.typed:
        yield Said(lengths, (), "the length of a sample follows from the data there: type seq=N")


def _nemo_rate(given: Given) -> Said:
    """The learning rate: constant without a section; with one, missing settings follow from the rate and the steps."""
    names = [f"lr_scheduler.{each}" for each in ("lr_decay_style", "lr_warmup_steps", "min_lr")]
    if not any(name.startswith("lr_scheduler.") for name in given.values):
        constant = ((STYLE, "constant"), ("optim.warmup_steps", "0"))
        return Said(("lr_scheduler",), constant, "the file has no such section")
    rate, steps = float(given.get("optimizer.lr", 1e-3)), given.count("step_scheduler.max_steps", 0)
    warmup = given.count(names[1], min(1000, steps // 10))
    values = (STYLE, str(given.get(names[0], "cosine"))), ("optim.warmup_steps", str(warmup))
    late = "ppctl's warm-up starts at 0, AutoModel's at a tenth of lr" if warmup else ""
    return Said(given.some(*names), (*values, ("optim.min_lr", str(given.get(names[2], f"{rate / 100:g}")))), late)


JOINT = {TORCHTITAN: torchtitan, AUTOMODEL: automodel}
"""System -> the meaning of its settings that belong together."""
