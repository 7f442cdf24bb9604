"""plan.json holds the whole plan: nothing is lost, and its keys are those that programs rely on."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from unit_plan import plan

from ppctl.plan import Plan


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, "1KiB"]),
)
def test_a_plan_survives_json(
    pp: int, vpp: int, gbs: int, tied: bool, capacity: int | None, memory: str | None
) -> None:
    made = plan(
        pp=pp,
        vpp=vpp,
        gbs=gbs,
        model__share_embeddings_and_output_weights=tied,
        pipeline__p2p_capacity=capacity,
        launch__device_memory=memory,
    )
    again = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.digest == made.digest == made.to_json()["digest"]
    assert again.forward_schedule == made.forward_schedule


def test_the_report_has_the_keys_that_programs_rely_on() -> None:
    data = plan(pp=2, vpp=2, model__mtp_num_layers=1).report()
    assert data["world_size"] == 2
    assert data["parallel"].keys() >= {"pp", "vpp", "tp", "cp", "ep", "etp", "dp"}
    assert data["layout"] == "Ett|tt|tt|ttmL"
    assert data["stages"][3]["layers"] == ["decoder.6", "decoder.7", "mtp.0", "loss"]
    assert data["stages"][0].keys() >= {"stage", "pp_rank", "vpp_rank", "layers", "params", "flops_forward"}
    assert data["pp_ranks"][0].keys() >= {
        *("pp_rank", "params", "weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"),
        *("peak_bytes", "in_flight"),
    }
    assert data.keys() >= {"params_total", "params_mtp", "params_active", "params_hf"}
    assert data["replicated_params"] == [0, 0, 0, 320 * 256]
    assert data["schedule"].keys() >= {
        *("name", "microbatches", "actions_per_rank", "bubble_fraction", "step_time_s", "time_calibrated")
    }
    assert len(data["schedule"]["actions_per_rank"]) == 2
    assert data["derived"][0].keys() == {"key", "value", "equation"}
    assert data["problems"] == []
    json.dumps(data)


def test_plan_json_adds_what_the_run_needs_to_the_report() -> None:
    made = plan(
        pp=2, gbs=1, launch__transport="channels", parallel__batch_p2p_comm=False, parallel__overlap_p2p_comm=True
    )
    whole = made.to_json()
    assert whole.keys() - made.report().keys() == {"provenance", "digest"}
    assert whole["schedule"]["actions"] == [
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
    ]
    assert whole["schedule"]["capacities"] == {"0->1 F": 2, "1->0 B": 2}
