"""Adapters in a pipeline have the bits of a plain loop with peft; weights stay as they were; peft loads the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of as run_of
from foreign_models import described_here, model_of
from full_disk import files_of_at_most
from one_save import save_checkpoint
from oracle.data import microbatches
from ranks import run_ranks
from torch import Tensor, nn

from ppctl.comm.channels import DirectEnd
from ppctl.comm.communicator import FusedBatch, LooseBatch
from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.errors import ConfigError
from ppctl.foreign.peft_adapters import AdapterDropout, canonical
from ppctl.launch.weights import model_values
from ppctl.model.dropout import Draws, name_key, sample_key
from ppctl.model.initialize import initial_value
from ppctl.model.loss import microbatch_loss
from ppctl.plan.build import build_plan
from ppctl.pretrained.hugging_face import export_checkpoint
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint, start_from
from ppctl.train.step import Trainer

# Models are described, which takes ten seconds of a quiet machine.
pytestmark = pytest.mark.timeout(400)

CPU = torch.device("cpu")
STEPS = 3
LORA = {"rank": "3", "targets": "[q_proj,down_proj]", "alpha": "5"}
TIED = "Granite"
WHOLE = {"Llama": "[embed_tokens,input_layernorm,lm_head]", TIED: "[model.norm]"}
CUTS: dict[str, dict[str, Any]] = {
    "pp=2": dict(pp=2, vpp=1),
    "pp=2, vpp=2, recomputed, embedding and head alone": dict(
        pp=2, vpp=3, layout="E|t|t|t|t|L", recompute_granularity="full", recompute_method="uniform"
    ),
    "pp=2, split backwards": dict(pp=2, vpp=1, pp_schedule="zb_h1"),
}
LATE: dict[str, tuple[dict[str, Any], int, list[tuple[int, int]]]] = {
    "1f1b, one stage trained": (dict(pp=3, vpp=1, layout="E|t*2|t*2L"), 3, [(3, 0), (3, 0), (0, 0)]),
    "1f1b, two stages trained": (dict(pp=3, vpp=1, layout="E|t*2|t*2L"), 1, [(3, 0), (3, 0), (0, 3)]),
    "interleaved, recomputed": (
        dict(pp=2, vpp=2, layout="E|tt|t|tL", recompute_granularity="full", recompute_method="uniform"),
        3,
        [(6, 0), (3, 0)],
    ),
    "interleaved": (dict(pp=2, vpp=2, layout="E|t|tt|tL"), 1, [(6, 0), (3, 3)]),
    "zb_h1": (dict(pp=2, vpp=1, pp_schedule="zb_h1"), 3, [(3, 0), (0, 0)]),
    "zbv": (dict(pp=2, vpp=2, layout="E|t|tt|tL", pp_schedule="zbv_zero_bubble"), 1, [(3, 3), (3, 0)]),
    "gpipe, batched messages": (
        dict(pp=3, vpp=1, layout="E|t*2|t*2L", pp_schedule="gpipe", overlap_p2p_comm=False, batch_p2p_comm=True),
        1,
        [(3, 0), (3, 0), (0, 3)],
    ),
}
"""A cut, the first layer with adapters, and how many activations and gradients each rank sends in a step."""


def run_config(text: Path, cut: str, kind: str = "Llama") -> RunConfig:
    return config_of(text, CUTS[cut], kind, LORA)


def more(kind: str) -> dict[str, str]:
    """With dropout, and modules that are trained whole: some in the layers, one before and one behind them."""
    return LORA | {"dropout": "0.3", "modules_to_save": WHOLE[kind]}


def config_of(text: Path, cut: dict[str, Any], kind: str, lora: dict[str, str]) -> RunConfig:
    config = run_of(text, m=3, **cut)
    directory = text.parent / kind
    model = asdict(config.model) | dict(_values(directory, **lora)) | {"from_": str(directory), "lora": lora}
    config.model = ModelConfig(**model)
    config.train.steps = STEPS
    return config


@cache
def _values(directory: Path, **lora: str) -> Any:
    return model_values(str(directory), "transformers", {}, lora)


def train(mapping: dict, directory: str, resumed: str | None = None) -> tuple[list, list, dict, dict, set]:
    """In a rank: losses, norms, adapters, frozen weights, and what the optimizer holds."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), CPU)
    if resumed is None:
        start_from(session, Path(str(config.model.from_)))
    else:
        load_checkpoint(session, Path(resumed))
    first = 0 if resumed is None else 2
    trainer = Trainer(session, session.data.batches(first, first * config.train.global_batch_size))
    records = []
    for step in range(first, STEPS):
        records.append(trainer.step(step).record)
        if step == 1:
            save_checkpoint(session, Path(directory), 2, 2 * config.train.global_batch_size)
    frozen = {n: t.detach().clone() for s in session.model.stages.values() for n, t in s.canonical_buffers().items()}
    weights = {name: p.detach().clone() for name, p in session.replica.weights.master.items()}
    gradients = {n for s in session.model.stages.values() for n, p in s.model.named_parameters() if p.grad is not None}
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], weights, frozen, gradients


def train_and_count(mapping: dict, directory: str) -> tuple[tuple, Counter[str]]:
    """In a rank: the same, and the messages that left it, by direction."""
    sent: Counter[str] = Counter()

    def counting(send: Any) -> Any:
        def counted(*arguments: Any) -> None:
            (end,) = (each for each in arguments if isinstance(each, DirectEnd))
            sent[end.channel.direction] += 1
            send(*arguments)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for way in (DirectEnd, LooseBatch, FusedBatch):
            patch.setattr(way, "send", counting(way.send))
        return train(mapping, directory), sent


@cache
def by_a_plain_loop(
    text: Path, kind: str, first: int = 0, *, full: bool = False
) -> tuple[list, list, dict[str, Tensor], dict[str, Tensor]]:
    """The whole model with peft in one process, its adapters filled with the run's first values."""
    import peft

    config = config_of(text, CUTS["pp=2"], kind, more(kind) if full else late(first))
    optim = config.optim
    base = model_of(kind)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    if first:
        lora.layers_to_transform = list(range(first, 4))
    model = peft.inject_adapter_in_model(lora, base)
    drops = dropouts(model, 0.3) if full else []
    for name, parameter in model.named_parameters() if full else ():
        whole = WHOLE[kind].strip("[]").split(",")
        parameter.requires_grad_("lora_" in name or name.rpartition(".")[0].endswith(tuple(whole)))
    adapters = {canonical(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in adapters.items():
            if "lora_" in name:
                parameter.copy_(initial_value(name, config.model, config.train.seed))
    groups = {decay: [p for n, p in adapters.items() if decays(n) == decay] for decay in (True, False)}
    adamw = torch.optim.AdamW(
        [{"params": group, "weight_decay": optim.weight_decay * decay} for decay, group in groups.items()],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    losses, norms = [], []
    for step, batch in enumerate(microbatches(config, STEPS)):
        total, loss_of_step = float(sum(mask.sum() for _, _, mask in batch)), 0.0
        for mb, (tokens, labels, mask) in enumerate(batch):
            samples = [sample_key(config.train.seed, step, mb * len(tokens) + row) for row in range(len(tokens))]
            for drop in drops:
                drop.draws = Draws(torch.tensor(samples))
            loss = microbatch_loss(model(input_ids=tokens, use_cache=False).logits, labels, mask, total)
            loss_of_step += loss.item()
            loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in adapters.values()])
        nn.utils.clip_grads_with_norm_(adapters.values(), optim.clip_grad, norm)
        losses.append(loss_of_step)
        norms.append(norm.item())
        for group in adamw.param_groups:
            group["lr"] = lr_at(step, optim, STEPS)
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {name: p.detach() for name, p in adapters.items()}, before


def decays(name: str) -> bool:
    return "norm" not in name and "embed" not in name


def dropouts(model: nn.Module, p: float) -> list[AdapterDropout]:
    """Put a dropout into each adapter, which draws by its name in the model."""
    made = []
    for name, module in [*model.named_modules()]:
        if isinstance(getattr(module, "lora_dropout", None), nn.ModuleDict):
            made.append(AdapterDropout(p))
            made[-1].key = torch.tensor(name_key(f"{name}.lora_dropout"))
            module.lora_dropout["default"] = made[-1]
    return made


def late(layer: int) -> dict[str, str]:
    """Adapters from this layer on."""
    return LORA | ({"layers": f"[{layer}-3]"} if layer else {})


def hold(found: list, text: Path, kind: str, first: int = 0, layer: int = 0, *, full: bool = False) -> None:
    losses, norms, adapters, before = by_a_plain_loop(text, kind, layer, full=full)
    assert len(set(losses)) == STEPS
    seen: set[str] = set()
    for own_losses, own_norms, own, frozen, gradients in found:
        assert own_losses == losses[first:] and own_norms == norms[first:]
        assert [name for name, value in own.items() if not torch.equal(value, adapters[name])] == []
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        assert [n for n, t in frozen.items() if not torch.equal(t, before[n if n in before else tied[n]])] == []
        assert full or all("lora_" in name for name in gradients)
        seen |= own.keys() | (frozen.keys() & before.keys())
    assert seen == adapters.keys() | before.keys()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "corpus.txt"
    path.write_text("adapters learn, and weights stay as they were " * 60)
    for kind in ("Llama", TIED):
        model_of(kind).save_pretrained(path.parent / kind)
    return path


@pytest.fixture(autouse=True, scope="module")
def own_cache() -> Iterator[None]:
    with described_here():
        yield


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        ("pp=2, vpp=2, recomputed, embedding and head alone", TIED),
        pytest.param("pp=2, split backwards", "Llama", marks=pytest.mark.whole),
    ],
)
def test_adapters_in_any_cut_have_the_bits_of_peft_in_one_process(text: Path, tmp_path: Path, cut: str, kind: str):
    hold(run_ranks(train, 2, to_mapping(run_config(text, cut, kind)), str(tmp_path), timeout=300.0), text, kind)


@pytest.mark.parametrize("way", [way if way == "zbv" else pytest.param(way, marks=pytest.mark.whole) for way in LATE])
def test_stages_before_the_first_adapter_run_forwards_alone_and_get_no_gradient(text: Path, tmp_path: Path, way: str):
    cut, layer, sent = LATE[way]
    config = config_of(text, cut, "Llama", late(layer))
    found = run_ranks(train_and_count, cut["pp"], to_mapping(config), str(tmp_path), timeout=300.0)
    hold([each for each, _ in found], text, "Llama", layer=layer)
    if way == "zbv":
        has_adapters_in_layers(tmp_path, text, range(layer, 4))
    assert [(counts["F"], counts["B"]) for _, counts in found] == [
        (STEPS * ahead, STEPS * back) for ahead, back in sent
    ]


def has_adapters_in_layers(checkpoints: Path, text: Path, layers: range) -> None:
    """An export has adapters where training had them, and peft loads them there alone, every one."""
    import peft

    out = checkpoints / "exported"
    export_checkpoint(next(checkpoints.glob("step-*")), out, lambda *_: None)
    loaded = peft.PeftModel.from_pretrained(model_of("Llama"), out)
    made = {
        canonical(name.removeprefix("base_model.model.")) for name, _ in loaded.named_parameters() if "lora_" in name
    }
    assert made == {n for n in by_a_plain_loop(text, "Llama", layers.start)[2]}
    assert {int(name.split(".")[2]) for name in made} == {*layers}


def test_a_checkpoint_goes_on_in_another_cut_and_peft_loads_its_adapters(text: Path, tmp_path: Path) -> None:
    import peft

    config = run_config(text, "pp=2")
    hold(run_ranks(train, 2, to_mapping(config), str(tmp_path), timeout=300.0), text, "Llama")
    other = run_config(text, "pp=2, vpp=2, recomputed, embedding and head alone")
    saved = tmp_path / "step-00000002"
    saved = saved if saved.exists() else next(tmp_path.glob("step-*"))
    again = run_ranks(train, 2, to_mapping(other), str(tmp_path / "other"), str(saved), timeout=300.0)
    hold(again, text, "Llama", first=2)
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        export_checkpoint(saved, tmp_path / "exported", lambda *_: None)
    done = export_checkpoint(saved, tmp_path / "exported", lambda *_: None)
    assert done.parameters == sum(each.numel() for each in by_a_plain_loop(text, "Llama")[2].values())
    loaded = peft.PeftModel.from_pretrained(model_of("Llama").eval(), tmp_path / "exported")
    (tokens, *_), *_ = microbatches(config, 1)[0]
    with torch.no_grad():
        theirs = loaded(input_ids=tokens).logits
        plain = model_of("Llama").eval()(input_ids=tokens).logits
        assert not torch.equal(theirs, plain)
        ours = logits_of(config, saved, tokens)
    assert torch.equal(theirs, ours)


def logits_of(config: RunConfig, checkpoint: Path, tokens: Tensor) -> Tensor:
    """What the whole model with the checkpoint's adapters makes of tokens, as one stage."""
    from ppctl.checkpoint.manifest import read_manifest
    from ppctl.checkpoint.reading import CheckpointReader
    from ppctl.foreign.foreign_stage import build_foreign_stage
    from ppctl.geometry.foreign_model import foreign_of
    from ppctl.geometry.layers import parse_layers
    from ppctl.plan import StageSpec

    layers = parse_layers(["embedding", *(f"decoder.{n}" for n in range(config.model.num_layers)), "loss"])
    spec = StageSpec(0, 0, 0, layers, (), (), 0, 0, 0)
    foreign = foreign_of(config.model)
    assert foreign is not None
    stage = build_foreign_stage(spec, config.model, foreign, seed=1, dtype=torch.float32, device="cpu")
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    table = f"model.{foreign.anatomy.uses[0]}"
    for name, parameter in {**stage.canonical_parameters(), **stage.frozen}.items():
        shared = name in foreign.anatomy.uses
        parameter.copy_(reader.tensor(table if shared else f"model.{name}"))
    (found,) = stage.eval()(tokens, tokens=tokens)
    return found


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        ("pp=2, vpp=2, recomputed, embedding and head alone", "Llama"),
        pytest.param("pp=2, split backwards", "Llama", marks=pytest.mark.whole),
        pytest.param("pp=2", TIED, marks=pytest.mark.whole),
    ],
)
def test_with_dropout_and_modules_trained_whole_no_cut_changes_a_bit_and_peft_loads_all(
    text: Path, tmp_path: Path, cut: str, kind: str
) -> None:
    import peft

    config = config_of(text, CUTS[cut], kind, more(kind))
    hold(run_ranks(train, 2, to_mapping(config), str(tmp_path), timeout=300.0), text, kind, full=True)
    assert by_a_plain_loop(text, kind)[0] != by_a_plain_loop(text, kind, full=True)[0]
    saved = next(tmp_path.glob("step-*"))
    export_checkpoint(saved, tmp_path / "exported", lambda *_: None)
    loaded = peft.PeftModel.from_pretrained(model_of(kind).eval(), tmp_path / "exported")
    told = loaded.peft_config["default"]
    assert told.lora_dropout == 0.3 and told.modules_to_save == WHOLE[kind].strip("[]").split(",")
    (tokens, *_), *_ = microbatches(config, 1)[0]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, logits_of(config, saved, tokens))


@pytest.mark.parametrize(
    ("whole", "kind", "said"),
    [
        ("[q_proj]", "Llama", "has an adapter in it: model.layers.0.self_attn.q_proj.lora_A.weight"),
        pytest.param("[lm_head]", TIED, "are the same tensor in this model", marks=pytest.mark.whole),
        pytest.param(
            "[rotary_emb]", "Llama", "no module with weights has a name that ends in", marks=pytest.mark.whole
        ),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(text: Path, whole: str, kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        _values(text.parent / kind, **LORA | {"modules_to_save": whole})
    assert refused.value.problems[0].remedy == "model.lora.modules_to_save=null"


def test_replicas_train_the_adapters_of_one_process(text: Path, tmp_path: Path) -> None:
    config = run_config(text, "pp=2")
    config.parallel.data_parallel_size, config.launch.gpus_per_node = 2, 4
    config.train.global_batch_size, config.train.micro_batch_size = 4, 1
    config.parallel.data_parallel_sharding = "optimizer_gradients"
    found = run_ranks(train, 4, to_mapping(config), str(tmp_path), timeout=300.0)
    one = run_config(text, "pp=2")
    one.train.global_batch_size, one.train.micro_batch_size = 4, 1
    alone = run_ranks(train, 2, to_mapping(one), str(tmp_path / "one"), timeout=300.0)
    for losses, norms, *_ in found:
        assert losses == pytest.approx(alone[0][0], rel=1e-6) and norms == pytest.approx(alone[0][1], rel=1e-5)


def test_the_plan_counts_optimizer_and_gradients_of_what_is_trained(text: Path) -> None:
    from ppctl.cost.parameter_counts import on_device, stage_count, trained_count, untrained_bytes

    config = run_config(text, "pp=2")
    plan = build_plan(config, {})
    adapters = sum(each.numel() for each in by_a_plain_loop(text, "Llama")[2].values())
    base = sum(each.numel() for each in by_a_plain_loop(text, "Llama")[3].values())
    trained = sum(sum(on_device(trained_count(config.model, s.layers), plan.sizes)) for s in plan.stages)
    assert trained == adapters
    assert sum(sum(on_device(stage_count(config.model, s.layers), plan.sizes)) for s in plan.stages) == adapters + base
    frozen = sum(untrained_bytes(config.model, s.layers, weight=2, gradient=4) for s in plan.stages)
    assert frozen == 2 * base
    (said,) = [each.equation for each in plan.derived if each.key == "implementation"]
    assert f"{adapters:,} parameters of adapters of rank 3 on q_proj, down_proj are trained" in said
