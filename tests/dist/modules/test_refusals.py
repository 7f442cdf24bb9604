"""What cannot be cut or run is one clear error on every rank, before any message and without a hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_modules import PARTS, WIDTH, AwareInside, Net, batches, made
from ranks import run_ranks
from torch import Tensor, nn

import ppctl
from ppctl.errors import PpctlError

GOOD = PARTS[2]
ALL = [*GOOD[0], *GOOD[1]]
INNER = [["model.embed", "model.layers.0"], ["model.layers.1", "model.layers.2", "model.layers.3", "head"]]


class Skips(nn.Module):
    """A residual that skips a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(y := self.first(x)) + y


class ReadsWeight(nn.Module):
    """A head that is the embedding's table, without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.map = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.table(x)) @ self.table.weight.T


class Backwards(nn.Module):
    """A module of the first part is called behind one of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class ReadsValues(nn.Module):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * (1 if x.sum() > 0 else 2)


class Loses(nn.Module):
    """A parameter of the model itself, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a, self.b = nn.Parameter(torch.ones(3)), nn.Linear(3, 3), nn.Linear(3, 3)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].register_buffer("table", torch.ones(3), persistent=False)
    return model


@dataclass(frozen=True)
class Case:
    """A model, its config, and words of the error."""

    code: str
    words: str
    config: dict[str, Any]
    model: Callable[[], nn.Module] = Net
    rows: int = 8
    batch: Any = None


def state() -> tuple[Tensor, Tensor]:
    return torch.ones(4, WIDTH), torch.zeros(4, 3, dtype=torch.int64)


def parts(*names: list[str]) -> dict[str, Any]:
    return dict(module_fqns_per_model_part=list(names))


def no_number(output: Tensor, labels: Tensor) -> Tensor:
    return output.mean(-1)


def raises(output: Tensor, labels: Tensor) -> Tensor:
    raise ValueError("not of these")


CASES = {
    "no names": Case("PP-E131", "none are given", {}),
    "unknown": Case("PP-E131", "part 1 names 'norms'", parts(GOOD[0], [*GOOD[1], "norms"])),
    "uncovered": Case("PP-E131", "no part holds head.weight", parts(GOOD[0], GOOD[1][:-1])),
    "uncovered parameter": Case("PP-E131", "no part holds scale", parts(["a"], ["b"]), Loses),
    "twice": Case(
        "PP-E131",
        "embed is named in parts 0 and 1",
        parts(GOOD[0], ["embed", *GOOD[1]]),
    ),
    "within": Case(
        "PP-E131",
        "layers, which holds it",
        parts(GOOD[0], ["layers", "norm", "head"]),
    ),
    "empty": Case("PP-E131", "part 1 names no module", parts(ALL, [])),
    "three parts": Case(
        "PP-E131",
        "3 parts, which 2",
        parts(GOOD[0][:2], [GOOD[0][2]], GOOD[1]),
    ),
    "no lists": Case("PP-E131", "one list of names", dict(module_fqns_per_model_part=["embed", "head"])),
    "layers counted": Case("PP-E130", "layers_per_stage counts", dict(layers_per_stage=2)),
    "rows": Case("PP-E130", "not a whole number of microbatches of 3", dict(parts(*GOOD), pp_microbatch_size=3)),
    "calls": Case("PP-E130", "pp_batch_size=6", dict(parts(*GOOD), pp_batch_size=6)),
    "length": Case("PP-E130", "pp_seq_len is 9", dict(parts(*GOOD), pp_seq_len=9)),
    "dtype": Case("PP-E130", "dtype='int8' is no floating dtype", dict(parts(*GOOD), dtype="int8")),
    "form": Case("PP-E130", "a mapping, not a Tensor", parts(*GOOD), batch=torch.ones(2)),
    "schedule": Case("PP-E130", "is no schedule", dict(parts(*GOOD), pp_schedule="2f2b")),
    "auto": Case("PP-E130", "needs a plan", dict(parts(*GOOD), pp_schedule="auto")),
    "chunks": Case("PP-E305", "1f1b runs one chunk", parts(*PARTS[4])),
    "too few": Case(
        "PP-E304",
        "needs 4 or more microbatches",
        dict(parts(*PARTS[4]), pp_schedule="dualpipev", pp_microbatch_size=4),
    ),
    "file": Case("PP-E216", "cannot be read", dict(parts(*GOOD), pp_schedule_csv="nowhere.csv")),
    "skips": Case("PP-E132", "reads the result of first", parts(["first"], ["second"]), Skips, batch=state()),
    "weight": Case("PP-E132", "reads table.weight of part 0", parts(["table"], ["map"]), ReadsWeight),
    "order": Case("PP-E132", "c of part 0 is called when part 1", parts(["a", "c"], ["b"]), Backwards, batch=state()),
    "values": Case("PP-E132", "cannot be followed", parts(["a"], ["b"]), ReadsValues, batch=state()),
    "unlimited": Case("PP-E130", "pp_microbatch_size=0 must be", dict(parts(*GOOD), pp_microbatch_size=0)),
    "another type": Case("PP-E130", "pp_microbatch_size='2' must be", dict(parts(*GOOD), pp_microbatch_size="2")),
    "exception": Case("PP-E132", "nobody has written", parts(["a"], ["b"]), lambda: Raises(), batch=state()),
    "no function": Case("PP-E130", "loss_fn='mse' is a str", dict(parts(*GOOD), loss_fn="mse")),
    "no number": Case("PP-E130", "returns a tensor [1, 10]", dict(parts(*GOOD), loss_fn=no_number)),
    "a loss that raises": Case("PP-E553", "ValueError: not of these", dict(parts(*GOOD), loss_fn=raises)),
    "no logits": Case("PP-E130", "not [1, 16]", parts(["a"], ["b"]), lambda: FailsLater(), batch=state()),
    "two tensors": Case(
        "PP-E132", "only the hidden state crosses a cut", parts(["a"], ["b"]), lambda: TwoTensors(), batch=state()
    ),
    "no values": Case("PP-E132", "0.table is on meta without values", parts(["0"], ["1"]), on_meta),
    "residual in a forward that is patched": Case(
        "PP-E132",
        "the model's own forward, in part 1, reads a tensor of part 0",
        dict(parts(*INNER), patch_causal_lm_model=False),
        lambda: AwareInside(unprepared()),
    ),
}


def unprepared() -> nn.Module:
    """An inner model whose residuals are outside of its layers."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Inner()


def refused() -> list[list[tuple[str, str]]]:
    """What each case's error says, on a rank."""
    found = []
    for case in CASES.values():
        problems: list[tuple[str, str]] = []
        try:
            pipeline = ppctl.pipeline(case.model(), ppctl.PipelineConfig(**case.config))
            pipeline.step(batches(1, case.rows)[0] if case.batch is None else case.batch)
        except PpctlError as error:
            problems = [(problem.code, problem.message) for problem in error.problems]
        found.append(problems)
    return found


def test_every_misuse_is_one_clear_error_on_all_ranks() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    for (name, case), problems in zip(CASES.items(), first, strict=True):
        assert {code for code, _ in problems} == {case.code}, (name, problems)
        assert case.words in problems[0][1], name


class Raises(nn.Module):
    """Its forward is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("nobody has written this yet")


class TwoTensors(nn.Module):
    """A cut of which two tensors would have to travel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = TwoHeads(), AddsBoth()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(*self.a(x))
        return found


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class AddsBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.map(x) + y


def unlike() -> list[str]:
    """Batches and models that differ between the ranks."""
    rank = dist.get_rank()
    found = []
    pipeline = ppctl.pipeline(made("plain"), ppctl.PipelineConfig(module_fqns_per_model_part=GOOD))
    for batch in (batches(1, 4 + 2 * rank)[0], batches(1, 4)[0] if rank else "text"):
        try:
            pipeline.step(batch)
        except PpctlError as error:
            found.append(error.problems[0].message)
    try:
        ppctl.pipeline(Net() if rank else Skips(), ppctl.PipelineConfig(module_fqns_per_model_part=GOOD))
    except PpctlError as error:
        found.append(error.problems[0].code)
    pipeline.step(batches(1, 4)[0])  # nothing was lost on the way
    return found


def test_ranks_that_disagree_are_told_so_on_all_of_them() -> None:
    first, second = run_ranks(unlike, 2)
    assert first == second
    assert "different batches: rank 0 a step of 4 microbatches" in first[0]
    assert "rank 1 a step of 6 microbatches" in first[0]
    assert "not a str" in first[1]
    assert first[2] == "PP-E131"


@torch.no_grad()
def without_gradients(pipeline: Any, batch: Any) -> Any:
    return pipeline.step(batch)


def calls_that_differ() -> list[str]:
    """After steps of two shapes, calls that only some ranks change; each as an error of all, and no rank waits."""
    rank, found = dist.get_rank(), list[str]()
    pipeline = ppctl.pipeline(made("plain"), ppctl.PipelineConfig(module_fqns_per_model_part=GOOD))
    four, six = batches(1, 4)[0], batches(1, 6)[0]
    pipeline.eval(six)
    pipeline.step(four)
    calls: list[Callable[[], Any]] = [
        lambda: pipeline.step(six if rank else four),  # both known
        lambda: pipeline.step(four if rank else batches(1, 8)[0]),  # one of them new
        lambda: pipeline.step(four) if rank else pipeline.eval(four),
        lambda: pipeline.step(four if rank else 3),
        lambda: without_gradients(pipeline, four) if rank else pipeline.step(four),
        lambda: pipeline.step(four),
        lambda: closed_first(pipeline, four) if rank else pipeline.step(four),
    ]
    for call in calls:
        try:
            call()
            found.append("ran")
        except PpctlError as error:
            found.append(error.problems[0].message)
    pipeline.close()
    return found


def closed_first(pipeline: Any, batch: Any) -> None:
    pipeline.close()
    pipeline.step(batch)


def test_no_rank_waits_for_one_that_makes_another_call() -> None:
    first, second = run_ranks(calls_that_differ, 2)
    assert first == second
    assert "rank 0 a step of 4 microbatches" in first[0] and "rank 1 a step of 6 microbatches" in first[0]
    assert "rank 0 a step of 8 microbatches" in first[1] and "rank 1 a step of 4 microbatches" in first[1]
    assert "rank 0 an evaluation of 4 microbatches" in first[2] and "rank 1 a step of" in first[2]
    assert "not a int" in first[3]
    assert "gradients are disabled" in first[4]
    assert first[5] == "ran" and "the pipeline is closed" in first[6]


def configs_that_differ() -> list[str]:
    rank, found = dist.get_rank(), list[str]()
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (Net(), dict(parts(*GOOD), pp_microbatch_size=1 + rank)),
        (Net(), parts(GOOD[0], GOOD[1]) if rank else parts(GOOD[0][:-1], [GOOD[0][-1], *GOOD[1]])),
        (nn.Sequential(nn.Linear(3, 4 + rank), nn.Linear(4 + rank, 3)), parts(["0"], ["1"])),
    ]
    for model, fields in cases:
        try:
            ppctl.pipeline(model, ppctl.PipelineConfig(**fields))
        except PpctlError as error:
            found.append(str(error))
    return found


def test_configs_and_models_that_differ_between_ranks_are_errors() -> None:
    first, second = run_ranks(configs_that_differ, 2)
    assert first == second and len(first) == 3
    assert "different configs: rank 0 pp_microbatch_size=1, rank 1 pp_microbatch_size=2" in first[0]
    assert "different configs" in first[1]
    assert "different models: rank 0 0.weight [4, 3], rank 1 0.weight [5, 3]" in first[2]


def after_groups_of_ones_own(mended: bool) -> str:
    """A pipeline with tied weights behind a group that rank 1 alone has made."""
    for _ in range(dist.get_rank() or mended):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        pipeline = ppctl.pipeline(made("tied"), ppctl.PipelineConfig(module_fqns_per_model_part=GOOD))
    except PpctlError as error:
        return str(error)
    pipeline.step(batches(1, 4)[0])
    return "ran"


def test_ranks_that_have_made_other_numbers_of_groups_are_told_so() -> None:
    first, second = run_ranks(after_groups_of_ones_own, 2, False)
    assert first == second and first.startswith("PP-E130: ranks have made different numbers of process groups (rank 0")
    assert "new_group([rank], use_local_synchronization=True) on ranks that have made fewer" in first
    assert run_ranks(after_groups_of_ones_own, 2, True) == ["ran", "ran"]


class FailsLater(nn.Module):
    """Its second part raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.device.type != "meta" and FAILING:
            raise RuntimeError("told to")
        return self.b(x)


FAILING: list[object] = []
"""True for a forward, `backward`, `detach` for one without a gradient, or `short` for a result of another shape."""


def test_after_a_step_that_failed_alone_another_one_runs() -> None:
    pipeline = ppctl.pipeline(FailsLater(), ppctl.PipelineConfig(module_fqns_per_model_part=[["a", "b"]]))
    batch = rows()
    FAILING.append(True)
    with pytest.raises(Exception, match="told to"):
        pipeline.step(batch)
    FAILING.clear()
    pipeline.zero_grad()
    assert pipeline.step(batch) is not None


def rows() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 3, WIDTH), torch.zeros(4, 3, dtype=torch.int64)


def one_that_fails(schedule: str, failing: int) -> list[str]:
    """A step and an evaluation in which one rank's forward raises, a step that runs; and a failure amid messages."""
    parts = [["a"], ["b"], ["c"], ["d"]] if schedule == "interleaved_1f1b" else [["a", "b"], ["c", "d"]]
    fields = dict(module_fqns_per_model_part=parts, pp_schedule=schedule)
    pipeline, found = ppctl.pipeline(FailsHere(), ppctl.PipelineConfig(**fields)), list[str]()
    pipeline.step(rows())
    whole = [parameter.grad.clone() for parameter in pipeline.parameters()]

    def attempt(call: Callable[[Any], Any]) -> None:
        try:
            call(rows())
            found.append("ran")
        except Exception as error:
            found.append(f"{error} <- {error.__cause__!r}")

    FAILING[:] = [True] * (pipeline.info.pp_rank == failing)
    attempt(pipeline.step)
    attempt(pipeline.eval)
    FAILING.clear()
    pipeline.zero_grad()
    attempt(pipeline.step)
    same = all(torch.equal(p.grad, before) for p, before in zip(pipeline.parameters(), whole, strict=True))
    pipeline._broken = "KeyboardInterrupt: " if pipeline.info.pp_rank == failing else ""  # as if it had left
    attempt(pipeline.eval)
    attempt(pipeline.step)
    return [*found, str(same)]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_forward_that_fails_on_one_rank_is_an_error_of_all_in_the_same_call(schedule: str, failing: int) -> None:
    ranks = run_ranks(one_that_fails, 2, schedule, failing)
    for rank, (step, evaluation, again, broken, further, same) in enumerate(ranks):
        words = "failed in microbatch 0: RuntimeError: told to" if rank == failing else "says why"
        for told in (step, evaluation):
            assert told.startswith(f"PP-E558: rank {failing}") and words in told
            assert told.endswith("<- RuntimeError('told to')" if rank == failing else "<- None")
        assert again == "ran" and same == "True", "a step behind it is as ever"
        words = "for: KeyboardInterrupt" if rank == failing else f"for: rank {failing} of the pipeline says why"
        for told in (broken, further):
            assert told.startswith("PP-E554") and words in told and "try: end all ranks" in told


class FailsHere(nn.Module):
    """Its modules raise when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (Raising() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class Raising(nn.Linear):
    """Raises when it is told to."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or not FAILING:
            return super().forward(x)
        if FAILING == [True]:
            raise RuntimeError("told to")
        y: Tensor = super().forward(x.detach() if FAILING == ["detach"] else x)
        if FAILING == ["short"]:
            return y[:, :1]
        if FAILING == ["backward"] and y.requires_grad:
            y.register_hook(raise_told)
        return y


def raise_told(_: Tensor) -> None:
    raise RuntimeError("told to")


def one_whose_backward_fails(schedule: str, failing: int, how: str) -> list[str]:
    """Two steps in which one rank's backward raises, an evaluation amid them, and a step that runs."""
    parts = [["a"], ["b"], ["c"], ["d"]] if schedule == "interleaved_1f1b" else [["a", "b"], ["c", "d"]]
    config = ppctl.PipelineConfig(module_fqns_per_model_part=parts, pp_schedule=schedule)
    pipeline, found = ppctl.pipeline(FailsHere(), config), list[str]()
    pipeline.step(rows())
    whole = [parameter.grad.clone() for parameter in pipeline.parameters()]
    for failing_now in (True, True, False):
        pipeline.zero_grad()
        FAILING[:] = [how] * (failing_now and pipeline.info.pp_rank == failing)
        try:
            pipeline.step(rows())
            found.append("ran")
        except Exception as error:
            found.append(f"{error} <- {error.__cause__!r}")
        FAILING.clear()
        pipeline.eval(rows())
    same = all(torch.equal(p.grad, before) for p, before in zip(pipeline.parameters(), whole, strict=True))
    return [*found, str(same)]


@pytest.mark.parametrize(
    ("schedule", "failing", "how", "why"),
    [
        *(
            (schedule, rank, "backward", "told to")
            for schedule in ("1f1b", "interleaved_1f1b", "zb_h1")
            for rank in (0, 1)
        ),
        ("1f1b", 1, "detach", "has no gradient for its input"),
        ("zb_h1", 1, "detach", "has no gradient for its input"),
        ("1f1b", 0, "short", "put float32[1, 1, 16] on its edge"),
    ],
)
def test_a_backward_that_fails_on_one_rank_is_an_error_of_all_in_the_same_call(
    schedule: str, failing: int, how: str, why: str
) -> None:
    for rank, (first, second, third, same) in enumerate(run_ranks(one_whose_backward_fails, 2, schedule, failing, how)):
        for told in (first, second):
            assert told.startswith(f"PP-E558: rank {failing}")
            where = "failed in" if how == "short" else "failed in the backward of"
            assert (f"{where} microbatch 0: " in told and why in told) == (rank == failing), told
        assert third == "ran" and same == "True", "a step behind it is as ever"


def test_pipelines_over_one_group_are_closed_one_by_one() -> None:
    first, last = run_ranks(two_pipelines, 2)
    assert first == [None] * 4 and last[0] == last[1] == last[2] == last[3] is not None


def two_pipelines() -> list[float | None]:
    """Losses of two pipelines over one group before, between and after they are closed; and of a third one."""
    config, losses = ppctl.PipelineConfig(module_fqns_per_model_part=GOOD), list[Tensor | None]()
    one, two = (ppctl.pipeline(made("plain"), config) for _ in range(2))
    losses += [one.step(batches(1, 4)[0]), two.step(batches(1, 4)[0])]
    one.close()
    losses.append(two.step(batches(1, 4)[0]))
    two.close()
    three = ppctl.pipeline(made("plain"), config)
    losses.append(three.step(batches(1, 4)[0]))
    three.close()
    return [None if loss is None else loss.item() for loss in losses]


def test_a_value_that_a_forward_reads_is_shown_with_its_line() -> None:
    pipeline = ppctl.pipeline(ReadsValues(), ppctl.PipelineConfig(module_fqns_per_model_part=[["a", "b"]]))
    with pytest.raises(PpctlError) as error:
        pipeline.step(state())
    (problem,) = error.value.problems
    assert "x.sum() > 0" in problem.place and "test_refusals.py:" in problem.place
    assert "bool(mask.any())" in problem.remedy
    assert error.value.__cause__ is None, "the same text twice"


def test_a_misspelt_name_is_told_with_the_right_one() -> None:
    with pytest.raises(PpctlError) as error:
        ppctl.pipeline(Net(), ppctl.PipelineConfig(module_fqns_per_model_part=[[*ALL[:-1], "haed"]]))
    assert any("'haed'" in each.message and "head" in each.remedy for each in error.value.problems)


def test_arguments_of_other_kinds_are_one_clear_error() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("model=None is a NoneType", dict(model=None)),
        ("config={'pp_schedule': '1f1b'} is a dict", dict(model=Net(), config={"pp_schedule": "1f1b"})),
        ("parallelize=3 is a int", dict(model=Net(), parallelize=3)),
    ]
    for words, given in cases:
        with pytest.raises(PpctlError) as error:
            ppctl.pipeline(**given)
        assert error.value.problems[0].code == "PP-E130" and error.value.problems[0].message == words


def test_a_device_that_is_not_there_is_one_clear_error() -> None:
    for device in (*(() if torch.cuda.is_available() else ("cuda",)), "nosuch"):
        with pytest.raises(PpctlError, match=f"PP-E130: device='{device}'"):
            ppctl.pipeline(Net(), ppctl.PipelineConfig(module_fqns_per_model_part=[ALL]), device=device)


def test_names_that_are_missing_come_with_a_cut_that_can_be_pasted() -> None:
    with pytest.raises(PpctlError) as error:
        ppctl.pipeline(Net())
    remedy = error.value.problems[0].remedy
    field, _, parts = remedy.partition("=")
    pipeline = ppctl.pipeline(Net(), ppctl.PipelineConfig(**{field: eval(parts)}))
    assert pipeline.step(batches(1, 2)[0]) is not None


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    parts = [ALL]
    pipeline = ppctl.pipeline(made("tied"), ppctl.PipelineConfig(module_fqns_per_model_part=parts))
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    state = {name: torch.zeros_like(value) for name, value in before.items() if name != "head.weight"}
    with pytest.raises(PpctlError, match="PP-E537") as error:
        pipeline.load_state_dict({**state, "norm.weight": torch.zeros(3)})
    assert "norm.weight: [3] given, [16] expected" in error.value.problems[0].place
    assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
    pipeline.load_state_dict(state)  # a shared parameter may stand in it once
    assert not any(value.any() for value in pipeline.state_dict().values())
