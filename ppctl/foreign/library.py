"""The only importer of transformers: it reads configs with their overrides, builds models, and runs whole forwards."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.keys import did_you_mean, nearest
from ppctl.config.metadata import MOST_STAGES
from ppctl.errors import CheckpointError, ConfigError, Problem, pasted, pip_install
from ppctl.families.config_json import known_families
from ppctl.families.directory import CONFIG, quantised_note, read_config_file

_OLDEST = 5
"""The oldest supported major version: older ones record, name and convert differently."""


try:
    from huggingface_hub import errors
except ImportError:  # it comes with transformers, whose absence is reported
    ConfigFails: type[Exception] = ValueError
else:
    ConfigFails = errors.StrictDataclassError
"""The exception that the library's configs raise for values that they refuse."""


def _transformers() -> Any:
    """Import transformers. Raises ConfigError (PP-E526) if it is not installed, cannot be imported or is too old."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise _without_library(f"cannot be imported: {error}") from error
    if int(library.__version__.partition(".")[0]) < _OLDEST:
        raise _without_library(f"is {library.__version__} here: version {_OLDEST} or later is needed")
    return library


def _without_library(reason: str) -> ConfigError:
    message = f"transformers is needed for a model's own code, but {reason}"
    return ConfigError(Problem("PP-E526", message, pip_install("ppctl[transformers]")))


def library_version() -> str:
    """The installed version of transformers. Raises ConfigError (PP-E526) if it cannot be used."""
    return str(_transformers().__version__)


def config_from(text: str) -> Any:
    """Return the library's config of the JSON in `ForeignModel.config`."""
    fields = json.loads(text)
    return _transformers().AutoConfig.for_model(fields.pop("model_type"), **fields)


def read_own_config(directory: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Read the config.json of a directory as transformers' class for its model_type, with `overrides` of its fields.

    Raises ConfigError: PP-E520 without a readable config.json, PP-E526 without the library, PP-E527 for all but causal
    language models (encoders, several modalities, programs in the directory), PP-E550 for quantised weights, PP-E552
    for overrides of unknown fields, or with values that the library refuses.
    """
    read_config_file(directory)  # reports problems of the file in ppctl's words
    library = _transformers()
    config = _config_in(library, directory)
    if overrides:
        config = overridden(config, overrides, lambda fields: _config_in(library, directory, **fields))
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(directory, f"{kind} has an encoder, whose states every layer of the decoder reads")
    _refuse_modalities(config, directory)
    _refuse_quantised(config, directory)
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and not 0 < layers <= MOST_STAGES:  # building it would take hours
        raise _refused(directory, f"it has {layers} layers, but must have at least 1 and at most {MOST_STAGES}")
    causal = type(config) in library.AutoModelForCausalLM._model_mapping
    if type(config) in library.AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", True):
        remedy = "model.hf_overrides.is_decoder=true" if causal else ""
        raise _refused(directory, f"{kind} fills in masked words, and is no causal language model", remedy)
    if not causal:
        raise _refused(directory, f"{kind} is no causal language model of transformers {library.__version__}")
    return config


def _refuse_modalities(config: Any, directory: Path) -> None:
    """Raise ConfigError (PP-E527) for a model of more than text, with the command that extracts its language model."""
    if config.get_text_config() is config and not any("vision" in name for name in config.sub_configs):
        return
    model = _transformers().AutoModelForCausalLM._model_mapping.get(type(config), None)
    remedy = ""
    if model is not None and model.config_class is config.sub_configs.get("text_config"):
        load = "AutoModelForCausalLM.from_pretrained(argv[1]).save_pretrained(argv[2])"
        code = f"from sys import argv; from transformers import AutoModelForCausalLM; {load}"
        remedy = pasted("python", "-c", code, directory, f"{directory}-text")
    reason = f"{config.model_type} has several modalities or models in one ({', '.join(config.sub_configs)})"
    raise _refused(directory, f"{reason}; only a language model can be cut", remedy)


def _refuse_quantised(config: Any, directory: Path) -> None:
    """Raise ConfigError (PP-E550) for quantised weights, whose numbers transformers' code would train as weights."""
    given = getattr(config, "quantization_config", None)
    if given:
        method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", None)
        message = f"{directory}: its config.json has quantization_config ({method or 'of no named method'}), but "
        message += "transformers' own code would train the quantised numbers as weights"
        remedy = "model.implementation=ppctl" if config.model_type in known_families() and method == "fp8" else ""
        with suppress(CheckpointError):  # damaged weights are reported where they are read
            remedy = "model.hf_overrides.quantization_config=null" if quantised_note(directory) else remedy
        raise ConfigError(Problem("PP-E550", message, remedy, str(directory / CONFIG)))


def _config_in(library: Any, directory: Path, **fields: Any) -> Any:
    """Read the config of a directory with these fields set. Raises ConfigError (PP-E527) with the library's reason."""
    try:
        return library.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **fields)
    except Exception as error:  # each class has rules and errors of its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[-1:]) if fields else " ".join(lines[:2])
        raise _refused(directory, f"transformers {library.__version__} does not read its config: {reason}") from None


def _refused(directory: Path, reason: str, remedy: str = "") -> ConfigError:
    message = f"{directory} cannot be cut into stages: {reason}"
    remedy = remedy or "a directory with a decoder-only language model"
    return ConfigError(Problem("PP-E527", message, remedy, str(directory)))


def make_model(config: Any, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the whole model of a config with random weights; on `meta`, weights and buffers have no values."""
    with torch.device(device):
        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)
    return model


def read_whole_model(directory: Path, dtype: torch.dtype | None) -> nn.Module:
    """Read a directory's model with its weights, as transformers does; `dtype` None keeps the files' dtype. Raises
    ConfigError as `read_own_config`, and PP-E527 with the library's reason."""
    config, library = read_own_config(directory), _transformers()
    load, alone = library.AutoModelForCausalLM.from_pretrained, dict(local_files_only=True, trust_remote_code=False)
    try:
        model: nn.Module = load(directory, config=config, dtype=dtype or "auto", **alone)
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused(directory, f"transformers does not load it: {str(error).partition(chr(10))[0]}") from None
    return model


@contextmanager
def known_rows(*, packed: bool | None = False, hides: bool | None = None) -> Iterator[None]:
    """Tell transformers whether positions restart within rows (`packed`) and whether a mask hides tokens (`hides`).
    With None transformers reads the tensors in every forward: the host waits for the GPU, and on meta that fails."""
    masks: Any = importlib.import_module("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)

    def without_reading(*arguments: Any, **named: Any) -> Any:
        assert look is not None  # this is called only if it is set
        with _patched(masks, {"is_tracing": lambda *_: True}):
            return look(*arguments, **named)

    functions: dict[str, Callable[..., Any]] = {}
    if packed is not None:
        functions["find_packed_sequence_indices"] = without_reading if packed else lambda *_, **__: None
    if hides is not None:
        functions["fast_all"] = lambda _: not hides  # kernels are faster without a mask
    with _patched(masks, functions):
        yield


@contextmanager
def _patched(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace functions of a module; names that the installed version lacks are skipped."""
    before = {name: own for name in functions if (own := getattr(module, name, None)) is not None}
    for name in before:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)


def recorded() -> list[Tensor]:
    """Return the list into which transformers' `OutputRecorder` collects router logits in the present forward, in the
    order of calls; what a caller adds to it counts as recorded. Outside a forward the list is empty and unused."""
    collector = importlib.import_module("transformers.utils.output_capturing")._active_collector.get()
    logits: list[Tensor] = [] if collector is None else collector.get("router_logits", [])
    return logits


def call(model: Any, **given: Tensor) -> tuple[Tensor, ...]:
    """Run a whole forward; returns the logits, and the loss that the model's own code adds for its routers (a number).

    That loss includes the model's coefficient, and is left out if it has no gradient. A model that gets labels returns
    the sum of all its losses; this replaces its cross entropy by 0 for good, since ppctl computes its own. Raises
    ValueError if the model's code computes its cross entropy in a way that cannot be replaced.
    """
    (tokens,) = given.values()
    shape, device, asked = tokens.shape[:2], tokens.device, []

    def nothing(*_: Any, **__: Any) -> Tensor:
        asked.append(True)
        return torch.zeros((), device=device)

    model.loss_function = nothing
    with known_rows():
        labels = torch.zeros(shape, dtype=torch.int64, device=device)
        result = model(**given, labels=labels, use_cache=False, return_dict=True)
    if asked:
        return (result.logits, result.loss) if result.loss.requires_grad else (result.logits,)
    if getattr(result, "aux_loss", None) is not None:
        raise ValueError("it makes its loss by itself, so that what it adds for its routers cannot be told apart")
    return (result.logits,)


class Conversions:
    """transformers' rules that turn tensors in files into a model's: renamings, and conversions of several tensors."""

    def __init__(self, model: Any) -> None:
        self._core = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        self._model, self._state = model, model.state_dict()
        self._renamings = [each for each in mapping if isinstance(each, self._core.WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, self._core.WeightConverter)]

    @property
    def order(self) -> Callable[[str], Any]:
        """The library's key for sorting names: expert 2 before expert 10."""
        sort_key: Callable[[str], Any] = self._core.dot_natural_key
        return sort_key

    def target_of(self, stored: str) -> tuple[str, str | None]:
        """Return (the model's name of a stored tensor, the pattern of its stored name if several parts have it)."""
        prefix = self._model.base_model_prefix
        renamed: tuple[str, str | None] = self._core.rename_source_key(
            stored, self._renamings, self._converters, prefix, self._state
        )
        return renamed

    def converted(self, name: str, parts: dict[str, list[Tensor]]) -> Tensor:
        """Return the model's tensor `name`, computed from its stored parts; `parts` lists them by name pattern."""
        converter = next(each for each in self._converters if set(parts) <= set(each.source_patterns))
        value: Any = parts
        for operation in converter.operations:
            value = operation.convert(
                value,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        (tensor,) = value.values()
        whole: Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return whole


KEY = "model.hf_overrides"
CODE = "PP-E552"
_PRECISION = ("dtype", "torch_dtype")
"""Fields that name the dtype of the weights in a file."""


def overridden(config: Any, overrides: Mapping[str, str], make: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return `make(fields)` for the values of these texts; `config` is the one without overrides. Raises ConfigError
    (PP-E552): for each field that is unknown, has no effect or takes no text, or with the message of an error of
    `make`."""
    values = {name: value_of(text) for name, text in overrides.items()}
    problems = [problem for name, text in overrides.items() if (problem := _unfit(config, name, text)) is not None]
    if problems:
        raise ConfigError(problems)
    for name, value in values.items():
        if isinstance(getattr(config, name), float) and type(value) is int:  # configs demand the exact type
            values[name] = float(value)
    try:
        made = make(values)
    except ConfigError as refused:
        remedy = "\n".join(_typed(name, getattr(config, name)) for name in values)
        raise ConfigError(_problem(", ".join(values), refused.problems[0].message, remedy)) from None
    own = {name: getattr(config, name) for name, value in values.items() if isinstance(value, str)}
    unread = [
        name for name, value in own.items() if isinstance(value, bool | int | float)
    ]  # some fields are not validated
    if unread:
        raise ConfigError(
            [_problem(name, f"takes no text such as {values[name]!r}", _typed(name, own[name])) for name in unread]
        )
    return made


def value_of(text: str) -> Any:
    """Return the JSON value of a text, such as a finite number, null or a list; else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _unfit(config: Any, name: str, text: str) -> Problem | None:
    """The problem of a field that the config does not have, or whose value has no effect; else None."""
    if name.startswith("__") or not hasattr(config, name) or callable(getattr(config, name)):
        fields = [field for field in vars(config) if not field.startswith("_")]
        message = f"the config of {config.model_type} has no such field{did_you_mean(name, fields)}"
        return _problem(name, message, next((_typed(each, text) for each in nearest(name, fields)), ""))
    if name in _PRECISION:
        return _problem(name, "has no effect: the run's precision is the dtype of its weights", "parallel.bf16=true")
    return None


def _problem(name: str, message: str, remedy: str) -> Problem:
    return Problem(CODE, f"{KEY}.{name}: {message}", remedy, KEY)


def _typed(name: str, value: Any) -> str:
    return pasted(f"{KEY}.{name}={value if isinstance(value, str) else _text(value)}")


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)
