"""The two kinds of models that are cut: a user's module by names of its modules, a transformers model by its layers."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.pipeline_config import PipelineConfig, calculate_virtual_stages
from ppctl.errors import CheckpointError, ConfigError, Problem, some
from ppctl.foreign.cut import CODE as NAMES_CODE
from ppctl.foreign.cut import cut_by_names, further_names
from ppctl.foreign.cut_proof import Crossing, look_at
from ppctl.foreign.cut_stage import CutStage, copied
from ppctl.foreign.fully_shard import Casts, StageDtypes, imitate
from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.layers import Layer
from ppctl.layout import even_layout
from ppctl.layout.reader import read_layout
from ppctl.model.loss import NO_TOKEN
from ppctl.modules.batch import Microbatch
from ppctl.modules.pipeline_agreement import misuse
from ppctl.plan.split_options import Unfit, stages_by_names
from ppctl.schedule.policies import AUTO, POLICIES, schedule_policy


class OwnModel:
    """A user's module. Raises ConfigError as `cut_by_names` does; PP-E130 and PP-E132 if it cannot be cut.

    `ties` has the stage of every use of each shared parameter, by name, the owner first. `reads_masks` says whether the
    stages' forwards need to know the values of attention masks and positions.
    """

    reads_masks = False

    def __init__(self, model: nn.Module, config: PipelineConfig, pp: int) -> None:
        for field in ("layers_per_stage", "round_virtual_stages_to_pp_multiple"):
            if getattr(config, field) is not None and config.module_fqns_per_model_part is None:
                message = f"{field} counts layers of a transformers model, but {type(model).__name__} is cut by names"
                remedy = f"{field}=None module_fqns_per_model_part=[[...], [...]]"
                raise misuse(message, remedy)
        self.model, self.cut = model, cut_by_names(model, config.module_fqns_per_model_part, pp)
        self.num_stages = len(self.cut.parts)
        asked = ((config.patch_causal_lm_model, ""), (config.patch_inner_model, self.cut.inner))
        self.aware = frozenset(name for patched, name in asked if not patched)
        self._further = further_names(model)
        uses: dict[str, dict[str, int]] = defaultdict(dict)
        for name in (each for further, owner in self._further.items() for each in (owner, further)):
            uses[self._further.get(name, name)][name] = self.cut.part_of(name.rpartition(".")[0]) or 0
        self.ties = tuple(uses.values())
        _refuse_lost_buffers(model)
        self._around: tuple[Casts, ...] = ()
        self._blank = copied(model, torch.device("meta"), self._further)

    def make_stage(self, number: int, device: torch.device) -> CutStage:
        """The module of a stage, whose parameters and buffers have the whole model's names."""
        return CutStage(self.model, self.cut, number, device, self.aware, self._further)

    def compute_in(self, stages: Sequence[StageDtypes]) -> None:
        """Let the model on meta compute in the dtypes of its stages, from which the messages' dtypes follow."""
        imitate(self._blank, stages)
        self._around = tuple(stage.around for stage in stages)

    def look_at(self, microbatch: Microbatch, device: torch.device) -> Crossing:
        """The messages between the stages for microbatches of this form. Raises ConfigError (PP-E130, PP-E132)."""
        arguments = microbatch.positional, microbatch.named
        return look_at(self._blank, self.cut, arguments, self.aware, self._around, device)

    def refuse_values(self, microbatch: Microbatch) -> None:
        """Do nothing: a user's module gives values any meaning."""

    def run(self, module: Any, arrived: Tensor | None, microbatch: Microbatch) -> Any:
        """Run a stage's forward; returns the next stage's input, or the last stage's result for the loss."""
        return module(arrived, microbatch.positional, microbatch.named)


class TransformersModel:
    """A transformers model, which has been proved to run in stages. Making one raises ConfigError: PP-E131 for names
    that do not fit, PP-E130 for an unknown schedule, PP-E119 or PP-E130 for a wrong number of stages."""

    reads_masks = True

    def __init__(self, config: Any, anatomy: Anatomy, dtype: torch.dtype, wanted: PipelineConfig, pp: int) -> None:
        self.config, self.anatomy, self.dtype = config, anatomy, dtype
        self.weights: Callable[[str], Tensor] | None = None
        """A function that returns a weight by name; None leaves weights without initial values."""
        self.untrained: Collection[str] = ()
        """Names of parameters that an instance's user has frozen."""
        self._own_loss = wanted.loss_fn is None
        self._sent: list[torch.dtype] = []
        letters = _letters(wanted, anatomy, pp)
        self.num_stages = len(letters)
        self.layers: list[list[Layer]] = []
        decoders = (Layer("decoder", index) for index in range(anatomy.count))
        for stage in letters:
            kinds = {"E": Layer("embedding"), "L": Layer("loss")}
            self.layers.append([kinds.get(letter) or next(decoders) for letter in stage])
        ends = {anatomy.uses[0]: 0, anatomy.uses[-1]: self.num_stages - 1}
        self.ties = (ends,) if anatomy.tied else ()

    def make_stage(self, number: int, device: torch.device) -> CutStage:
        """The module of a stage, with the weights if there are any."""
        from ppctl.foreign.foreign_stage import ForeignStage
        from ppctl.foreign.library import make_model

        model = make_model(self.config, "meta", self.dtype).train()
        for name in self.untrained:
            model.get_parameter(name).requires_grad_(False)
        stage = ForeignStage(model, self.anatomy, self.layers[number], device)
        owner = {name: next(iter(uses)) for uses in self.ties for name in uses}
        tensors: Mapping[str, Tensor] = {**stage.canonical_parameters(), **stage.canonical_buffers()}
        if self.weights is not None:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(self.weights(owner.get(name, name)))
        return stage

    def compute_in(self, stages: Sequence[StageDtypes]) -> None:
        """Note the dtypes of the messages: a decoder layer returns its weights' dtype, unless it is cast."""
        self._sent = [stage.around.result or stage.weights or self.dtype for stage in stages]

    def look_at(self, microbatch: Microbatch, device: torch.device) -> Crossing:
        """The messages: hidden states, and the logits at the end. Raises ConfigError (PP-E130)."""
        tokens, _ = self._arguments(microbatch)
        rows, length = tokens.shape
        table = self.config.get_text_config()
        *sent, last = self._sent
        states = [torch.empty(rows, length, table.hidden_size, dtype=dtype, device="meta") for dtype in sent]
        logits = torch.empty(rows, length, table.vocab_size, dtype=last, device="meta")
        return Crossing(tuple(states), output=logits)

    def refuse_values(self, microbatch: Microbatch) -> None:
        """Raise ConfigError (PP-E130) for labels that equal the tokens: nothing shifts them here."""
        if self._own_loss:
            _refuse_unshifted(self._arguments(microbatch)[0], microbatch.labels)

    def run(self, module: Any, arrived: Tensor | None, microbatch: Microbatch) -> Any:
        """Run a stage's forward; returns the hidden state to send, or the logits."""
        tokens, beside = self._arguments(microbatch)
        known = dict(hides=microbatch.hides, packed=microbatch.packed)
        return module(tokens if arrived is None else arrived, beside=beside, **known)[0]

    def _arguments(self, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        """(token ids [rows, tokens], further arguments of the model's forward on every stage). Raises ConfigError."""
        named = {name: value for name, value in microbatch.named.items() if value is not None}
        beside = {**dict(zip(["input_ids"], microbatch.positional, strict=False)), **named}
        tokens = beside.pop("input_ids", None)
        others = [name for name, value in beside.items() if name not in _BESIDE or not isinstance(value, Tensor)]
        if len(microbatch.positional) > 1:
            others.append(f"{len(microbatch.positional)} arguments without names")
        if others or not isinstance(tokens, Tensor) or tokens.dim() != 2:
            what = f", not {', '.join(others)}" if others else ""
            message = f"a transformers model takes input_ids [rows, tokens], {' and '.join(_BESIDE)}{what}"
            remedy = "step(input_ids=tokens, attention_mask=mask, labels=labels)"
            raise misuse(message, remedy)
        return tokens, beside


PipelineModel = OwnModel | TransformersModel

_BESIDE = ("attention_mask", "position_ids")
"""Arguments from which transformers makes masks and positions, on every stage."""


def _refuse_unshifted(tokens: Tensor, labels: Any) -> None:
    """Raise ConfigError (PP-E130) for labels that transformers' own loss would shift: here token n would be compared
    with itself. A row of one repeated token looks the same shifted and unshifted: it passes."""
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape or not bool((tokens != tokens[:, :1]).any()):
        return
    counts = labels != NO_TOKEN
    if bool((~counts | (labels == tokens)).all()) and bool(counts.any()):
        message = "the labels equal the tokens, but a pipeline does not shift them: label i belongs to logits i"
        remedy = "labels=torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)"
        raise misuse(message, remedy)


def _letters(wanted: PipelineConfig, anatomy: Anatomy, pp: int) -> tuple[str, ...]:
    """The letters of each stage, as in a layout. Raises ConfigError."""
    parts = wanted.module_fqns_per_model_part
    if parts is None:
        policy = POLICIES[wanted_policy(wanted)]
        mode = wanted.round_virtual_stages_to_pp_multiple
        if mode is not None and wanted.layers_per_stage is None:
            message = (
                f"round_virtual_stages_to_pp_multiple={mode} rounds the stages of layers_per_stage, which is not set"
            )
            raise misuse(message, "round_virtual_stages_to_pp_multiple=None")
        single = policy.chunks == 1
        stages, _ = calculate_virtual_stages(anatomy.count, wanted.layers_per_stage, pp, single, mode)
        return tuple(read_layout(even_layout(anatomy.count, stages), "layout")[0])
    try:
        letters = stages_by_names(parts, anatomy.count, anatomy)
    except Unfit as error:
        remedy = f"names such as {anatomy.embedding}, {anatomy.layer(0)}, {anatomy.head}"
        raise ConfigError(Problem(NAMES_CODE, str(error), remedy)) from None
    problems = []
    for letter, names in (("E", anatomy.first), ("L", anatomy.last)):
        where = [number for number, stage in enumerate(letters) if letter in stage]
        right = 0 if letter == "E" else len(letters) - 1
        if where != [right]:
            named = "left out" if not where else f"in part {', '.join(map(str, where))}"
            message = f"{' and '.join(names)} must be in part {right} alone, not {named}"
            problems.append(Problem(NAMES_CODE, message, f"name {', '.join(names)} in part {right}"))
    if empty := [str(number) for number, stage in enumerate(letters) if not stage]:
        problems.append(Problem(NAMES_CODE, f"part {', '.join(empty)} names no module with parameters"))
    if len(letters) % pp or not letters:
        problems.append(Problem(NAMES_CODE, f"{len(letters)} parts cannot be shared evenly by {pp} pipeline ranks"))
    if problems:
        raise ConfigError(problems)
    return letters


def wanted_policy(config: PipelineConfig) -> str:
    """The policy that pp_schedule names. Raises ConfigError (PP-E130) for an unknown name and for `auto`."""
    policy = schedule_policy(config.pp_schedule)
    if policy is None or policy == AUTO:
        why = "needs a plan, but a module has none" if policy == AUTO else "is no schedule"
        known = ", ".join(name for name, each in POLICIES.items() if each.trains)
        raise misuse(f"pp_schedule={config.pp_schedule!r} {why}", f"one of {known}")
    return policy


def is_transformers(model: nn.Module) -> bool:
    """Whether a module is a transformers model, which exists only if the library is imported."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def whole_config(model: Any) -> tuple[Any, torch.dtype]:
    """The config and dtype of an instance. Raises ConfigError (PP-E132) if the instance differs from its config, or has
    hooks or activation checkpointing, which its stages would not have."""
    from ppctl.foreign.library import make_model

    dtypes = {parameter.dtype for parameter in model.parameters()}
    described = make_model(model.config, "meta")
    shapes = [{n: tuple(t.shape) for n, t in each.state_dict().items()} for each in (model, described)]
    problems, name, modules = [], type(model).__name__, dict(model.named_modules())
    if shapes[0] != shapes[1] or type(described) is not type(model) or len(dtypes) != 1:
        message = f"this {name} is not the causal language model of its config in a single dtype"
        remedy = "patch_inner_model=False patch_causal_lm_model=False with a forward that takes hidden states"
        problems.append(Problem("PP-E132", message, remedy))
    if hooked := [path or name for path, module in modules.items() if _has_hooks(module)]:
        message = f"this {name} has hooks on {some(hooked, 3)}, but its stages are made from its config"
        remedy = "handle.remove(), and parallelize=a function that puts hooks on the modules of a stage"
        problems.append(Problem("PP-E132", message, remedy))
    if any(getattr(each, "gradient_checkpointing", False) for each in modules.values()):
        message = f"this {name} recomputes activations, but its stages are made from its config"
        remedy = "parallelize=lambda stage: stage.model.gradient_checkpointing_enable()"
        problems.append(Problem("PP-E132", message, remedy))
    if problems:
        raise ConfigError(problems)
    return model.config, dtypes.pop()


def _has_hooks(module: Any) -> bool:
    """Whether a module has hooks, apart from those by which transformers records results of modules."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = [hook for table in tables for hook in getattr(module, table).values()]
    return any(getattr(each, "__module__", "") != "transformers.utils.output_capturing" for each in hooks)


def weights_of(model: nn.Module) -> Callable[[str], Tensor] | None:
    """The weights of an instance by name; None for an instance on meta."""
    state = model.state_dict(keep_vars=True)
    return None if any(tensor.device.type == "meta" for tensor in state.values()) else state.__getitem__


def weights_in(directory: Path, config: Any) -> Callable[[str], Tensor] | None:
    """The weights in a directory by name, read one at a time. Raises CheckpointError (PP-E523, PP-E524, PP-E538)."""
    from ppctl.families.directory import has_weights
    from ppctl.foreign.library import make_model
    from ppctl.foreign.stored import StoredWeights

    if not has_weights(directory):
        message = f"{directory} has a config.json but no weights"
        raise CheckpointError(Problem("PP-E538", message, "a model on meta, then pipeline.load_state_dict(...)"))
    model: Any = make_model(config, "meta")
    further = further_names(model)  # a tied head is stored once, under the table's name
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in further}
    return StoredWeights(directory, config, shapes).tensor


def _refuse_lost_buffers(model: nn.Module) -> None:
    """Raise ConfigError (PP-E132) for buffers on meta that no state dict has: nothing could fill them."""
    lost = [
        f"{path}.{key}"
        for path, module in model.named_modules()
        for key in module._non_persistent_buffers_set
        if (buffer := module._buffers[key]) is not None and buffer.device.type == "meta"
    ]
    if lost:
        message = f"{', '.join(lost[:5])} is on meta without values, but no state dict could fill it"
        raise ConfigError(
            Problem("PP-E132", message, "build the model on the CPU, or register the buffer as persistent")
        )
