"""Values that nobody means end in a problem with a remedy that works: never in a traceback, never in a hang.

What would hang is stopped by pytest's limit on a test; what keeps it from hanging are bounds, which are looked at.
"""

import os
import random
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from remedies import BASES, VALUES, Tally, attempt, planned_json, trials

DEEP_SMALL = ("+recipe=deepseek_v3", "+scale=smoke")
BIG = 2**63


def fates(typed: Sequence[tuple[str, ...]]) -> Tally:
    """What becomes of all these command lines and their remedies."""
    tally = Tally()
    for each in typed:
        attempt(each, tally)
    return tally


def assert_every_remedy_works(tally: Tally) -> None:
    bad = [line for line in tally.wrong if not line.startswith("new problem")]
    assert bad == [], tally.counts


INTERLEAVED = ("pipeline.pp_schedule=null", "pipeline.put_off_limit=null")
"""A schedule of any number of chunks, in place of the recipe's."""


@pytest.mark.parametrize(
    ("typed", "codes"),
    [
        (("+recipe=deepseek_v3", "model.num_moe_experts=-1"), {"PP-E103"}),
        (("+recipe=deepseek_v3", "model.num_moe_experts=-1", "vpp=7", *INTERLEAVED), {"PP-E103"}),
        (("+recipe=mixtral_8x7b", "model.moe_router_topk=-1"), {"PP-E103"}),
        (("cost.cublas_workspace_mib=nan",), {"PP-E103"}),
        (("cost.cublas_workspace_mib=inf",), {"PP-E103"}),
        (("+recipe=llama3_8b", "+scale=smoke", "model.hidden_size=0"), {"PP-E103"}),
        ((*DEEP_SMALL, "model.hidden_size=0"), {"PP-E103"}),
        ((*DEEP_SMALL, "model.num_moe_experts=0"), {"PP-E103"}),
        *(
            ((f"+recipe={recipe}", f"{key}={BIG}"), {"PP-E103"})
            for recipe, key in (
                ("deepseek_v3", "model.hidden_size"),
                ("deepseek_v3", "model.num_attention_heads"),
                ("deepseek_v3", "model.moe_router_topk"),
                ("deepseek_v3", "pp"),
                ("deepseek_v3", "pipeline.p2p_capacity"),
                ("llama3_8b", "model.num_query_groups"),
            )
        ),
        *(((f"{key}={2**64 + 1}",), {"PP-E103"}) for key in ("cp", "etp", "dp", "tp", "nodes")),
        (("gbs=1e12",), {"PP-E103"}),
        (("gbs=500000",), {"PP-E214"}),
        (("layout=@/dev/zero",), {"PP-E123"}),
        (("layout=@/dev/stdin",), {"PP-E123"}),
        (("cost.profile=@/dev/zero",), {"PP-E820"}),
        (("pipeline.pp_schedule_csv=/dev/zero",), {"PP-E216"}),
        ((f"model.from={'x' * 5000}",), {"PP-E520"}),
        ((f"pipeline.pp_schedule_csv={'x' * 5000}",), {"PP-E216"}),
        ((f"steps={'9' * 5000}",), {"PP-E105"}),
        (("data.path=[1e-999999999,a,1,b]",), {"PP-E103"}),
        ((f"launch.device_memory={'9' * 400}GiB",), {"PP-E103"}),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_raised_or_hung_is_refused_with_a_remedy_that_works(typed: tuple[str, ...], codes: set[str]) -> None:
    _, report = planned_json(typed)
    assert {problem["code"] for problem in report["problems"]} == codes
    assert all(problem["place"] for problem in report["problems"])
    tally = fates([typed])
    assert_every_remedy_works(tally)
    assert tally.counts["new problem"] == 0, tally.wrong


def test_a_sample_of_hostile_values_meets_no_traceback_and_every_remedy_works() -> None:
    chosen = random.Random(27)
    assert_every_remedy_works(fates([line for value in VALUES for line in chosen.sample([*trials(value)], 1)]))


@pytest.mark.whole
@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value[:12]))
def test_every_eighth_key_with_a_hostile_value_meets_no_traceback_and_every_remedy_works(value: str) -> None:
    """Every key meets three or four of the values here, and all of them in `make soak`."""
    assert_every_remedy_works(fates([*trials(value)][VALUES.index(value) % 8 :: 8]))


@pytest.mark.soak
@pytest.mark.timeout(480)
@pytest.mark.parametrize("shift", range(len(BASES)))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value[:12]))
def test_every_key_with_a_hostile_value_meets_no_traceback_and_every_remedy_works(value: str, shift: int) -> None:
    """Each `shift` has every pair of key and value, of key and base, and of value and base; all of them every three."""
    assert_every_remedy_works(fates([*trials(value, shift)]))


def test_trials_hold_every_pair_of_key_value_and_base_and_with_every_shift_all_three() -> None:
    each = [[(*typed[-1].split("=", 1), typed[:-1]) for value in VALUES for typed in trials(value, shift)]
            for shift in range(len(BASES))]  # fmt: skip
    keys = {key for key, _, _ in each[0]}
    for rows in each:
        assert len(rows) == len(keys) * len(VALUES)
        assert {(key, base) for key, _, base in rows} == {*product(keys, BASES)}
        assert {(value, base) for _, value, base in rows} == {*product(VALUES, BASES)}
    assert {row for rows in each for row in rows} == {*product(keys, VALUES, BASES)}


def endless(directory: Path, name: str) -> Path:
    """A name in `directory` behind which reading never ends."""
    path = directory / name
    path.symlink_to("/dev/zero")
    return path


def test_no_file_is_read_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    recipe, config = endless(tmp_path, "mine.yaml"), endless(tmp_path, "config.json")
    for typed in (
        f"layout=@{tmp_path}/pipe",
        f"pipeline.pp_schedule_csv={tmp_path}/pipe",
        f"cost.profile=@{tmp_path}/pipe",
        f"recipe={recipe}",
        f"model.from={config.parent}",
    ):
        code, report = planned_json((typed,))
        assert code == 2, typed
        told = " ".join(problem["message"] for problem in report["problems"])
        assert "device or a pipe" in told or "there is no recipe" in told or "is neither a directory" in told, told


@pytest.mark.parametrize(
    ("typed", "size"), [("layout=@{}", 2**24), ("cost.profile=@{}", 2**24), ("pipeline.pp_schedule_csv={}", 2**22),
                        ("recipe={}", 2**24)]
)  # fmt: skip
def test_a_file_that_is_too_long_is_refused_with_the_most_that_is_read(tmp_path: Path, typed: str, size: int) -> None:
    long = tmp_path / "long.yaml"
    with long.open("wb") as stream:
        stream.truncate(size + 1)
    code, report = planned_json((typed.format(shlex.quote(str(long))),))
    assert code == 2
    assert f"more than {size} bytes" in " ".join(problem["message"] for problem in report["problems"])


@pytest.mark.parametrize("text", ["[a", "- [E, t", "[" * 5000])
def test_a_layout_file_that_is_no_yaml_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "layout"
    file.write_text(text)
    code, report = planned_json((f"layout=@{file}",))
    assert (code, [problem["code"] for problem in report["problems"]]) == (2, ["PP-E123"])
