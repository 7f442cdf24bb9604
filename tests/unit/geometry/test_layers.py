"""A layer as a value, and as the text that files and messages hold."""

import pytest

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import Kind, Layer, holds_final_norm, layer_kinds, mtp_is_moe, parse_layers

EXPERTS = ModelConfig(num_layers=3, num_moe_experts=4, moe_layer_freq="[0]+[1]*2", mtp_num_layers=1)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Layer("embedding"), "embedding"),
        (Layer("decoder", 0), "decoder.0"),
        (Layer("decoder", 60), "decoder.60"),
        (Layer("mtp"), "mtp.0"),
        (Layer("loss"), "loss"),
    ],
)
def test_a_layer_has_one_text(layer: Layer, text: str) -> None:
    assert str(layer) == f"{layer}" == text
    assert Layer.parse(text) == layer


@pytest.mark.parametrize(
    "text",
    ["", "decoder", "decoder.", "decoder.x", "decoder.-1", "decoder.03", "decoder.1.2", "embedding.0", "encoder.0"],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no layer"):
        Layer.parse(text)


def test_layers_of_one_kind_are_equal_as_kinds() -> None:
    layers = parse_layers(["embedding", "decoder.0", "decoder.1", "decoder.2", "mtp.0", "loss"])
    dense, moe = Kind("decoder", False), Kind("decoder", True)
    ends = Kind("embedding", False), Kind("loss", False)
    assert layer_kinds(EXPERTS, layers) == [ends[0], dense, moe, moe, Kind("mtp", True), ends[1]]
    assert mtp_is_moe(EXPERTS) and not mtp_is_moe(ModelConfig())


@pytest.mark.parametrize(
    ("mtp", "layers", "holds"),
    [
        (None, ["loss"], True),
        (None, ["decoder.2"], False),
        (1, ["loss"], False),
        (1, ["decoder.2"], True),
        (1, ["decoder.1", "mtp.0"], False),
    ],
)
def test_the_final_norm_stands_before_what_reads_it(mtp: int | None, layers: list[str], holds: bool) -> None:
    assert holds_final_norm(ModelConfig(num_layers=3, mtp_num_layers=mtp), parse_layers(layers)) is holds
