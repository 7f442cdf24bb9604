"""`ppctl parity` on real ranks: equal where nothing is wrong, and an error that is planted is named."""

import json
import os
import signal
import time

import pytest
from helpers.command import TINY, alive, ppctl, start

TIED = "model.share_embeddings_and_output_weights=true"


def parity(cwd, *overrides, **more):
    return ppctl(*typed(cwd, *overrides), cwd=cwd, timeout=240, **more)


def typed(cwd, *overrides):
    """The words of `ppctl parity` on a small model in `cwd`."""
    text = cwd / "text.txt"
    text.write_text("the stage and the rank of a layer, a bubble and the rest " * 40)
    cut = [*TINY, "vpp=null", "pipeline.pp_schedule=1f1b", f"data.path={text}", "steps=3"]
    chosen = dict(word.split("=", 1) for word in [*cut, *(word for word in overrides if "=" in word)])
    rest = (word for word in overrides if "=" not in word)
    return ["parity", "+recipe=quickstart", *(f"{key}={value}" for key, value in chosen.items()), *rest]


def test_a_sum_that_is_left_out_from_step_2_on_is_named_there_and_step_1_is_equal_to_the_bit(tmp_path):
    done = parity(tmp_path, "pp=2", TIED, "--keep", "both", PPCTL_FAULT="unsummed all 2 ties")
    assert done.returncode == 1, done.stderr
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith(
        "different: step 2: loss equal; gradient of output.weight differs, first in stage 1 (rank 1)"
    )
    assert verdict.endswith("losses differ from step 3 on")
    assert "B: output.weight and tok_embeddings.weight are the same parameter" in done.stdout
    assert "every bit must be equal" in done.stdout

    assert "B did not finish: error PP-E504" in done.stdout, "unequal copies are not saved"

    # The same two runs as two runs of a person's.
    runs = [str(next((tmp_path / "both" / name).iterdir())) for name in ("one-process", "cut")]
    again = ppctl("parity", *runs, "--json", cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    report = json.loads(again.stdout)
    assert [step["same"] for step in report["steps"]] == [True, False, False]
    first, second, third = report["steps"]
    assert first["loss"][0] == first["loss"][1]
    assert not first["gradients"]["different"] and first["gradients"]["action"] is None
    assert {each["name"] for each in second["gradients"]["different"]} == {"output.weight", "tok_embeddings.weight"}
    assert second["gradients"]["action"] is None
    assert third["gradients"]["action"]["action"].startswith("0F"), "the weights of stage 0 are others by then"
    one = ppctl("parity", runs[0], runs[0], "--json", cwd=tmp_path)
    assert one.returncode == 0, one.stdout
    assert json.loads(one.stdout)["checkpoints"]["same"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("cut", "fault", "words"),
    [
        (("pp=2", "vpp=3", "pipeline.pp_schedule=interleaved_1f1b"), None, "equal to the bit"),
        (("pp=2", "pipeline.pp_schedule=zb_h1"), None, "equal to the bit"),
        (("pp=1", "dp=2"), None, "equal within what the order of sums allows"),
        (("pp=1", "tp=2", "model.num_query_groups=2"), None, "equal within what the order of sums allows"),
        (("pp=2", "cp=2"), None, "equal within what the order of sums allows"),
        (("pp=1", "dp=2", "ep=2", "model.num_moe_experts=4"), None, "equal within what the order of sums allows"),
        (("pp=2", "parallel.bf16=true"), None, "equal to the bit"),
        (("pp=2", "model.hidden_dropout=0.1", "train.batch_rampup=[4,4,8]"), None, "equal to the bit"),
        (
            ("pp=1", "dp=2", "parallel.data_parallel_sharding=optimizer_gradients"),
            None,
            "equal within what the order of",
        ),
        (("pp=1", "dp=2"), "dp", "gradient of"),
        (("pp=1", "tp=2", "model.num_query_groups=2", "sp=true"), "tp", "gradient of"),
    ],
)
def test_the_law_of_each_axis_holds_and_its_missing_sum_is_found(cut, fault, words, tmp_path):
    more = {} if fault is None else {"PPCTL_FAULT": f"unsummed all 1 {fault}"}
    done = parity(tmp_path, *cut, **more)
    assert done.returncode == (fault is not None), done.stdout + done.stderr
    assert words in done.stdout.splitlines()[-1]


def test_labels_of_another_position_are_seen_in_the_loss_and_its_stage(tmp_path):
    done = parity(tmp_path, "pp=2", "--steps", "1", PPCTL_FAULT="shifted all 1 all")
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("different: step 1: loss ") and "loss equal" not in verdict
    assert "; 1F0 on stage 1 is the first action that differs; gradient of output.weight differs" in verdict
    assert f"ppctl-{os.geteuid()}-" not in done.stdout, "the directory is removed"


def test_a_run_that_fails_is_told_without_the_paths_of_what_is_removed(tmp_path):
    done = parity(tmp_path, "pp=2", "--steps", "1", PPCTL_FAULT="raise 1 0 1F0", TMPDIR=str(tmp_path))
    assert done.returncode == 2 and "PP-E646" in done.stderr and "struck by a test" in done.stderr
    assert "its log: DIR/cut/" in done.stderr and "--keep DIR" in done.stderr and str(tmp_path) not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_ctrl_c_leaves_no_process_and_no_directory(tmp_path):
    begun = start(*typed(tmp_path, "pp=2", "--steps", "99", "gbs=64"), cwd=tmp_path, TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("ppctl-*/*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(tmp_path), "a rank"
    begun.send_signal(signal.SIGINT)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 130 and "interrupted: nothing was compared" in told
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"] and not alive(tmp_path)


def test_what_cannot_be_compared_is_refused_before_a_rank_starts(tmp_path):
    for words, code in ((("pp=1",), "PP-E644"), (("pp=2", "--steps", "0"), "PP-E644")):
        done = parity(tmp_path, *words)
        assert (done.returncode, code in done.stderr) == (2, True), done.stderr
    done = ppctl("parity", "a", "b", "pp=2", cwd=tmp_path)
    assert (done.returncode, "PP-E644" in done.stderr) == (2, True), done.stderr
