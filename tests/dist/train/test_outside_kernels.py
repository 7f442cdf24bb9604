"""Kernels that are not ppctl's: the script of the page, what it computes in a run of any kind, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import TINY, environment
from expert_runs import config_of as experts_config
from ranks import RanksFailed, run_ranks

from ppctl import Kernel, KernelUse, check_kernel
from ppctl.config.compose import compose
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import ConfigError, TrainingError
from ppctl.launch.planning import planned
from ppctl.model.kernels import Capability, choose_kernels
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan.build import build_plan
from ppctl.rehearsal.rank import rehearse
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

ROOT = Path(__file__).parents[3]
NAMES = ["own_kernels:attention", "own_kernels:grouped", "own_kernels:norm"]
CPU = Capability("cpu")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's module, which this process can import meanwhile."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), re.DOTALL)
    path = tmp_path / "own_kernels.py"
    path.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_kernels", None)
    return path


def test_the_script_of_the_page_compares_its_kernels_and_serves_in_a_run_that_names_them(script: Path) -> None:
    here = environment(PYTHONPATH=f"{ROOT}:{script.parent}")
    compared = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=here)
    assert compared.returncode == 0, compared.stderr
    assert [line.split()[0] for line in compared.stdout.splitlines()] == ["attention", "grouped_product", "norm"]
    command = [sys.executable, "-m", "ppctl", "train", "+recipe=quickstart", *TINY, "pp=1", "vpp=1", "train.steps=2"]
    named = f"model.kernels=[{NAMES[0]},{NAMES[2]}]"
    run = subprocess.run([*command, named], capture_output=True, text=True, timeout=100, env=here, cwd=script.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    (written,) = script.parent.rglob("env.json")
    kernels = json.loads(written.read_text())["kernels"]
    assert (kernels["attention"], kernels["norm"], kernels["experts"]) == (NAMES[0], NAMES[2], "one by one")


KINDS = {
    "experts": ("softmax", "Ett|tttL", {}),
    "recomputed": ("softmax", "Ett|tttL", {"recompute_modules": ["core_attn", "moe", "layernorm"]}),
    "split": ("softmax", "Ett|tttL", {"pp_schedule": "zb_h1"}),
    "latent": ("latent attention", "Ettt|ttL", {}),
    "several ranks hold experts": ("softmax", "Etttt|tL", {"ep": 2}),
}


def train(mapping: dict, directory: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, str]]:
    """Runs in a rank: (loss, norm) by step, the weights, and which kernels served."""
    sys.path.insert(0, directory)
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    records = [trainer.step(step).record for step in range(2)]
    told = [(record["loss"], record["grad_norm"]) for record in records]
    return told, {n: m.detach() for n, m in session.replica.weights.master.items()}, session.model.kernels.names()


@pytest.mark.parametrize(
    "kind", [each if each == "split" else pytest.param(each, marks=pytest.mark.whole) for each in KINDS]
)
def test_a_run_with_kernels_from_outside_is_the_run_without_them(text: Path, script: Path, kind: str) -> None:
    model, layout, more = KINDS[kind]
    script.write_text(
        script.read_text()
        + """
from ppctl.parallel.dispatch import ExpertExchange
dispatch = ppctl.Kernel(role="dispatch", function=ExpertExchange, tolerance=0.0)
"""
    )
    config = experts_config(text, model, 2, layout, 2, dp=more.get("ep", 1), ep=more.get("ep", 1))
    config.parallel.params_dtype = "float64"
    if "recompute_modules" in more:
        config.train.recompute_granularity, config.train.recompute_modules = "selective", more["recompute_modules"]
    config.pipeline.pp_schedule = more.get("pp_schedule", config.pipeline.pp_schedule)
    world = 2 * more.get("ep", 1)
    plain = run_ranks(train, world, to_mapping(config), str(script.parent))
    config.model.kernels = [*NAMES, *(["own_kernels:dispatch"] if "ep" in more else [])]
    for (told, masters, _), (own_told, own, kernels) in zip(
        plain, run_ranks(train, world, to_mapping(config), str(script.parent)), strict=True
    ):
        assert kernels["attention"] == NAMES[0] and kernels["experts"] == NAMES[1] and kernels["norm"] == NAMES[2]
        assert kernels.get("dispatch") == ("own_kernels:dispatch" if "ep" in more else None)
        assert [x for row in own_told for x in row] == pytest.approx([x for row in told for x in row], rel=1e-12)
        assert own.keys() == masters.keys()
        # AdamW's first steps divide gradients by their own size: a difference in a tiny one shows in full.
        assert all((own[name] - masters[name]).abs().max() <= 1e-6 for name in own)


def composed(*words: str):
    return compose(["+recipe=quickstart", *TINY, *words]).config


def test_the_first_kernel_that_fits_serves_and_where_none_does_the_run_does_not_start(script: Path) -> None:
    script.write_text(
        script.read_text()
        + """
never = ppctl.Kernel(role="attention", function=attend, tolerance=1e-5, fits=lambda use: f"{use.heads} heads")
"""
    )
    both = composed("model.kernels=[own_kernels:never,own_kernels:attention]")
    assert choose_kernels(both, CPU).names()["attention"] == "own_kernels:attention"
    with pytest.raises(ConfigError, match=r"PP-E773.*never cannot serve: 2 heads") as caught:
        choose_kernels(composed("model.kernels=[own_kernels:never,own_kernels:norm]"), CPU)
    assert caught.value.problems[0].remedy == "'model.kernels=[own_kernels:norm]'"


def test_with_more_ranks_than_groups_of_keys_a_rank_has_one(script: Path) -> None:
    script.write_text(
        script.read_text()
        + """
queries = ppctl.Kernel(
    role="attention", function=attend, tolerance=1e-5, fits=lambda use: f"{use.heads // use.groups} queries of a key"
)
"""
    )
    words = ("model.num_attention_heads=4", "model.num_query_groups=2", "tp=4", "model.kernels=[own_kernels:queries]")
    with pytest.raises(ConfigError, match="queries cannot serve: 1 queries of a key"):
        choose_kernels(composed(*words), CPU)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def", "cannot be imported: SyntaxError: "),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("open('/no/file')", "cannot be imported: FileNotFoundError: "),
        (
            "norm = ppctl.Kernel(role='norm', function=print, tolerance=0, fits=lambda use: 1 / 0)",
            "fails in its fits: Zero",
        ),
    ],
)
def test_an_error_in_a_persons_module_is_told_with_its_name(script: Path, code: str, says: str) -> None:
    script.write_text(f"{script.read_text()}\n{code}\n")
    with pytest.raises(ConfigError, match=f"PP-E773: own_kernels:norm {says}"):
        choose_kernels(composed("model.kernels=[own_kernels:norm]"), CPU)


WIDE = "model.ffn_hidden_size=32 model.num_query_groups=2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model.kernels=[no_such_module:x]", "cannot be imported"),
        ("model.kernels=[own_kernels:no_such_name]", "cannot be imported"),
        ("model.kernels=[own_kernels:attend]", "is no ppctl.Kernel, but function"),
        ("model.kernels=[own_kernels:attention] cp=2", "never called with parallel.context_parallel_size=2"),
        ("model.kernels=[own_kernels:attention] model.attention_dropout=0.1", "model.attention_dropout=0.1"),
        ("model.kernels=[own_kernels:attention] model.attention_backend=flash", "model.attention_backend=flash"),
        (
            "model.kernels=[own_kernels:norm] parallel.enable_autocast=true parallel.autocast_dtype=bfloat16",
            "enable_autocast=True",
        ),
        ("model.kernels=[own_kernels:grouped]", "model.num_moe_experts=None"),
        (
            "model.kernels=[own_kernels:grouped] model.num_moe_experts=4 model.fp8=e4m3 parallel.bf16=true " + WIDE,
            "model.fp8=e4m3",
        ),
    ],
)
def test_what_would_not_be_asked_is_refused_by_name_with_a_remedy_that_can_be_pasted(
    script: Path, words: str, says: str
) -> None:
    config = composed(*words.split())
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        choose_kernels(config, CPU)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E773"
    choose_kernels(composed(*words.split(), problem.remedy.strip("'")), CPU)


def test_only_names_are_taken_and_nothing_is_imported_to_plan() -> None:
    sys.modules.pop("own_kernels", None)
    _, plan, problems = planned(
        ["+recipe=quickstart", *TINY, "model.kernels=[own_kernels:attention]"], for_training=True
    )
    assert plan is not None and not problems and "own_kernels" not in sys.modules
    _, _, problems = planned(["+recipe=quickstart", *TINY, "model.kernels=[os.system]"], for_training=True)
    assert any("model.kernels" in str(problem) for problem in problems)


def test_a_rehearsal_refuses_them(script: Path) -> None:
    cuda = ["launch.device=cuda", "pp=1", "vpp=1"]
    found, plan, _ = planned(["+recipe=quickstart", *TINY, *cuda, f"model.kernels=[{NAMES[0]}]"], for_training=True)
    with pytest.raises(ConfigError, match=r"PP-E128.*tensors without values"):
        rehearse(found.config, plan, 0)


def shifted(q, k, v, scale):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * 1.01)


def short(x, weight, bias, epsilon):
    return torch.rms_norm(x, weight.shape, weight, epsilon)[:1]


def wide(x, weight, bias, epsilon):
    return torch.rms_norm(x, weight.shape, weight, epsilon).double()


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (Kernel(role="attention", function=shifted, tolerance=1e-4), "differs by"),
        (Kernel(role="norm", function=short, tolerance=1e-4), "the kernel for norm has a result of"),
        (Kernel(role="norm", function=wide, tolerance=1e-4), "torch.float64, not"),
        (Kernel(role="norm", function=wide, tolerance=1e-4, fits=lambda use: "never"), "does not fit this use: never"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found(kernel: Kernel, says: str) -> None:
    with pytest.raises(TrainingError, match=says) as caught:
        check_kernel(kernel, KernelUse(device="cpu"))
    assert caught.value.problems[0].code == "PP-E773"


def nan(x, weight, bias, epsilon):
    return x * torch.nan


def test_a_kernel_without_numbers_is_found() -> None:
    with pytest.raises(TrainingError, match="differs by nan"):
        check_kernel(Kernel(role="norm", function=nan, tolerance=1.0), KernelUse(device="cpu"))


class Norm(torch.autograd.Function):
    """RMSNorm with gradients by torch, which `hand_out` places."""

    @staticmethod
    def forward(ctx, x, weight, epsilon, hand_out):
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.hand_out = epsilon, hand_out
        return torch.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    def backward(ctx, gradient):
        given = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            out = torch.rms_norm(given[0], given[1].shape, given[1], ctx.epsilon)
        return *ctx.hand_out(gradient, *given, *torch.autograd.grad(out, given, gradient)), None, None


WORKSPACE = torch.empty(2, 16, 16)


def from_a_workspace(gradient, x, weight, of_x, of_weight):
    return WORKSPACE.copy_(of_x), of_weight


def in_the_memory_of_its_gradient(gradient, x, weight, of_x, of_weight):
    return gradient.copy_(of_x), of_weight


def in_the_memory_of_its_input(gradient, x, weight, of_x, of_weight):
    return x.data.copy_(of_x), of_weight


def as_one_number(gradient, x, weight, of_x, of_weight):
    return of_x, of_weight.mean().expand_as(of_weight)


def in_new_memory(gradient, x, weight, of_x, of_weight):
    return of_x, of_weight


@pytest.mark.parametrize(
    "hand_out",
    [from_a_workspace, in_the_memory_of_its_gradient, in_the_memory_of_its_input, as_one_number, in_new_memory],
)
def test_a_kernel_that_keeps_what_it_gives_away_is_found(hand_out) -> None:
    """Gradients are added to in their memory."""

    def normalise(x, weight, bias, epsilon):
        return Norm.apply(x, weight, epsilon, hand_out)

    kernel = Kernel(role="norm", function=normalise, tolerance=1e-4)
    if hand_out is in_new_memory:
        check_kernel(kernel, KernelUse(device="cpu"))
        return
    says = "differs by" if hand_out is as_one_number else "keeps or shares memory of gradients"
    with pytest.raises(TrainingError, match=says):
        check_kernel(kernel, KernelUse(device="cpu"))


class Scrambled(ExpertExchange):
    """Brings results back in another order."""

    def __call__(self, *given):
        return super().__call__(*given).flip(0)


def compare_dispatch(*, right: bool) -> dict[str, float]:
    kernel = Kernel(role="dispatch", function=ExpertExchange if right else Scrambled, tolerance=1e-6)
    return check_kernel(kernel, KernelUse(device="cpu"))


def test_a_dispatch_is_compared_over_all_ranks() -> None:
    for far in run_ranks(right_dispatch, 3):
        assert far.keys() == {"result", "gradient 0", "gradient 1"}
    with pytest.raises(RanksFailed, match="PP-E773"):
        run_ranks(wrong_dispatch, 2)


def right_dispatch() -> dict[str, float]:
    return compare_dispatch(right=True)


def wrong_dispatch() -> dict[str, float]:
    return compare_dispatch(right=False)


def test_a_compiled_layer_leaves_them_as_they_are(script: Path) -> None:
    outside = choose_kernels(composed(f"model.kernels=[{NAMES[0]}]", "train.compile=true"), CPU).outside
    assert outside["attention"].function._torchdynamo_disable
