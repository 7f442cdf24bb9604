"""config.json and ModelConfig, both ways, exactly or not at all.

Nothing is dropped silently: a model is written only if reading it back gives the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from ppctl.config.keys import keys_with, text_keys
from ppctl.config.mapping import converted_value
from ppctl.config.moe_layer_freq import fitted_moe_layer_freq, moe_layer_pattern
from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.families.conversions import POSITIONS, Unbuilt
from ppctl.families.family_table import FAMILIES, Family, Field

TRAINING = frozenset(key.attribute for key in keys_with("training").values())
"""Fields about training only: weights do not depend on them."""

_WRITTEN = frozenset({"model_type", "architectures", "dtype", "torch_dtype", *POSITIONS})
_OF_FILES = frozenset({"quantization_config", "auto_map"})
"""Keys about one directory's own weights and programs: they are not copied to another directory."""


def known_families() -> list[str]:
    """Every model_type that is read."""
    return sorted(name for family in FAMILIES for name in (family.model_type, *family.also))


def read_config(config: Mapping[str, Any], place: str) -> tuple[Family, ModelConfig]:
    """The family and the model of a config.json, which was read at `place`. Raises ConfigError: PP-E520 for an unknown
    family, PP-E521 naming each key that ppctl does not build or misses."""
    kind = config.get("model_type")

    def refused(message: object, key: str = "model_type", code: str = "PP-E521") -> Problem:
        look = ("grep", "-n", key) if key in config else ("python3", "-m", "json.tool")
        return Problem(code, str(message), pasted(*look, place), place)

    family = next((f for f in FAMILIES if kind in (f.model_type, *f.also)), None)
    if family is None:
        message = f"model_type {kind!r} is no family that ppctl builds; known are {', '.join(known_families())}"
        raise ConfigError(refused(message, code="PP-E520"))
    problems = [
        refused(f"{key}={config[key]} is not built for {kind}: {' or '.join(pasted(each) for each in allowed)} is", key)
        for key, allowed in family.fixed.items()
        if key in config and config[key] not in allowed
    ]
    values = dict(family.implied)
    filled = {**family.defaults, **{family.synonyms.get(key, key): value for key, value in config.items()}}
    for reads in ([partial(_read_field, field) for field in family.fields], [read for read, _ in family.conversions]):
        for read in () if problems else reads:
            try:
                values |= read(filled)
            except Unbuilt as error:
                problems.append(refused(error, error.key))
            except KeyError as error:
                problems.append(refused(f"{error.args[0]} is missing, but every {kind} has it", error.args[0]))
    if problems:
        raise ConfigError(problems)
    return family, canonical(ModelConfig(**values))


def _read_field(field: Field, config: Mapping[str, Any]) -> dict[str, Any]:
    """{our name: value} of a field of config.json. Raises Unbuilt for a value that ppctl does not build."""
    name = f"model.{field.ours}"
    try:
        value = converted_value(name, field.read(config[field.theirs]))
    except ValueError as error:
        raise Unbuilt(field.theirs, str(error)) from None
    limit = text_keys()[name].limit
    if limit is not None and value is not None and not limit.allows(value):
        raise Unbuilt(field.theirs, f"must be {limit.words}, not {value}")
    return {field.ours: value}


def write_config(model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family that expresses `model` exactly, and its config.json. Raises ConfigError (PP-E522) naming the keys that
    the nearest family cannot express."""
    wanted = _architecture(model)
    nearest: tuple[int, Family, list[str]] | None = None
    for family in FAMILIES:
        written = _write(family, model)
        try:
            read = _architecture(read_config(written, family.model_type)[1])
        except ConfigError:
            continue  # the model lacks a value that all of the family have
        lost = sorted(key for key, value in wanted.items() if read[key] != value)
        if not lost:
            return family, written
        if nearest is None or len(lost) < nearest[0]:
            nearest = (len(lost), family, lost)
    assert nearest is not None
    _, family, lost = nearest
    listed = ", ".join(f"model.{key}={wanted[key]}" for key in lost)
    message = f"no family expresses this model; {family.model_type} comes nearest, without {listed}"
    raise ConfigError(Problem("PP-E522", message, " ".join(["ppctl explain", *(f"model.{key}" for key in lost[:1])])))


def _write(family: Family, model: ModelConfig) -> dict[str, Any]:
    model = canonical(model)
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    values = [(field, field.write(getattr(model, field.ours))) for field in family.fields]
    written |= {field.theirs: value for field, value in values if value is not None or field.nullable}
    for _, write in family.conversions:
        written |= write(model)
    written |= {key: allowed[0] for key, allowed in family.fixed.items() if key not in written}
    if model.multi_latent_attention:
        written["num_key_value_heads"] = model.num_attention_heads
    return written


def foreign_keys(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys that neither define the model nor are written by ppctl, such as bos_token_id."""
    ours = {*family.defaults, *family.fixed, *family.synonyms, *(field.theirs for field in family.fields)}
    return {key: value for key, value in config.items() if key not in ours | _WRITTEN | _OF_FILES}


def canonical(model: ModelConfig) -> ModelConfig:
    """Return the model with every size written out, and with the default for each size that has no meaning in it."""
    plain, values = ModelConfig(), dict[str, Any]()

    def forget(names: Iterable[str]) -> None:
        values.update({name: getattr(plain, name) for name in names})

    if model.multi_latent_attention:
        forget(("num_query_groups", "kv_channels", "qk_layernorm", "rotary_percent", "add_qkv_bias"))
    else:
        values |= {"num_query_groups": model.query_groups, "kv_channels": model.head_dim}
        forget(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    if model.rotary_scaling_factor is None:
        forget(("rotary_scaling_type", "original_max_position_embeddings", "beta_fast", "beta_slow"))
    if model.rotary_scaling_factor is None or model.rotary_scaling_type != "yarn":
        forget(("mscale", "mscale_all_dim"))
    experts = model.num_moe_experts if True in moe_layer_pattern(model) else None
    if experts is None:
        forget(field.name for field in fields(model) if "moe" in field.name and field.name not in TRAINING)
    else:
        values |= {"moe_ffn_hidden_size": model.expert_width, "moe_layer_freq": fitted_moe_layer_freq(model)}
        values["moe_router_topk_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
        grouped = (model.moe_router_num_groups or 1) > 1
        values |= {} if grouped else {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return replace(model, mtp_num_layers=model.mtp_num_layers or None, **values)


def _architecture(model: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in asdict(canonical(model)).items() if key not in TRAINING}
