"""Every remedy that a refused command line prints is typed: it must mend what it was printed for, and break nothing."""

import shlex

import pytest
from remedies import mended, problems

from ppctl.cli.main import main

QUICK, DEEP = "+recipe=quickstart", "+recipe=deepseek_v3"
FOUR = ["pp=4", "gbs=16", "model.num_layers=12"]
EXPERTS = [*FOUR, "dp=2", "ep=2", "model.num_moe_experts=4"]
OVERLAP, DELAY = "parallel.overlap_moe_expert_parallel_comm=true", "parallel.delay_wgrad_compute=true"

WRONG = [
    [QUICK, typed]
    for typed in (
        "paralell.pp=4", "+parallel.pipeline_size=4", "++parallel.typo=4", "++model.num_layrs=4", "+foo=1",
        "stepz=x", "model._target_=os.system", "_target_=os.system", "optim.lrr=-1", "optim.lr.x=1",
        "hydra/launcher=x", "deffaults=[]", "model=tinny", "optim=x", "optim=[]", "model@x=tiny", "quickstart",
        "recipe", "+pp", "+nothing", "~optim.lr", "~pp", "~recipe", "~nothing", "pp=", "pp=null", "pp=1.5",
        "pp=a", "pp=é", "pp=a\nb", "pp='2", "pp=(2", "pp=[1]", "pp={a: 1}", "pp=nan", "pp=0", "pp=-1",
        "pp=99999999999999999999",
        "steps=" + "9" * 400, "lr=inf", "cost.te_workspace_mib=-1", "cost.profile=",
        "pp=1000000", "vpp=0", "vpp=1000000", "gbs=0", "gbs=7",
        "gbs=abc", "mbs=3", "mbs=1000000", "seq=0", "seq=10000000000", "steps=nan", "steps=null", "lr=nan",
        "lr=abc", "lr=${nothing}", "optim.min_lr=1", "optim.beta1=2", "model.num_layers=0",
        "model.num_layers=1000000", "model.hidden_size=7", "model.num_attention_heads=7",
        "model.num_query_groups=3", "model.kv_channels=3", "ep=2", "etp=2", "dp=3", "nodes=3",
        "gpus_per_node=3", "gpus_per_node=0", "gpus_per_node=1000000000", "layout=Et|t", "layout=Et|L",
        "layout=(tt|)*3,2L", "layout=", "layout=[]", "layout=@none", "layout=Et*1000000000000L",
        "layout=E|t,m|L", "layout=${pp}", "layout=3", "log.name=a/b", "log.name=", "log.name=null",
        "log.name=' '", "log.name=a\x07", f"log.name={'x' * 101}", "log.dir=", "launch.device=tpu",
        "launch.target=k8s", "launch.time=soon", "launch.time=1", "launch.container_mounts=[a:b]",
        "train.exit_after=soon", "launch.srun_args=[-n4]", "launch.python=", "launch.max_requeues=-1",
        "launch.health_check=", "launch.setup=3", "launch.signal_lead=0", "launch.code=mine",
        "launch.env=3", "launch.env={A: [1]}", "launch.env.RANK=7", "launch.env.PPCTL_SECRET=x",
        "launch.env.A-B=1", "launch.env={A b: 1}", "launch.device_memory=-1", "launch.device_memory=1KiB",
        "train.eval_interval=-1", "train.eval_interval=3", "train.on_bad_step=go",
        "train.seed=-1", "parallel.cpu_offloading=true",
        "parallel.cpu_offloading_num_layers=-1", "parallel.cpu_offloading_num_layers=2",
        "parallel.cpu_offloading_activations=false", "parallel.cpu_offloading_weights=true",
        "parallel.params_dtype=int8", "parallel.pipeline_dtype=bf16",
        "parallel.sequence_parallel=true", "checkpoint.keep=-1", "checkpoint.resume=", "data.path=",
        "data.tokenizer=", "data.path=[0.3,a,0.7]", "data.path=[-1,a]", "data.validation_split=1",
        "data.validation_path=a", "train.eval_steps=3",
        "pipeline.pp_schedule=1f1b", "pipeline.pp_schedule=dualpipe",
        "pipeline.pp_schedule=pipelineschedulemulti", "pipeline.pp_batch_size=3",
        "parallel.microbatch_group_size_per_vp_stage=1", "--pipeline-model-parallel-size", "--nonsense",
        "--seed=7", "--", "--train-iters", "-m", "published=3",
    )
] + [
    [QUICK, "+recipe=quikstart"], ["+recipe=quikstart"],
    [QUICK, "pp=3", "layout=Et|t|t|tL"], ["--bf16", QUICK], [DEEP, "gbs=100"], [DEEP, "gbs=abc"],
    [DEEP, "gbs=0"], [DEEP, "pp=0"], [DEEP, "nodes=1", "gbs=64"], [DEEP, "ep=3"], [DEEP, "tp=3", "gbs=128"],
    [QUICK, "optim.lr_decay_style=WSD"], [QUICK, "optim.lr_wsd_decay_steps=3"],
    [QUICK, "optim.lr_decay_style=piecewise"], [QUICK, "optim.lr_pieces=[{style: constant, until: 3}]"],
    [QUICK, "optim.lr_pieces=[{until: 3}]"], [QUICK, "optim.warmup_steps=3", "optim.warmup_tokens=1e6"],
    [QUICK, "optim.lr_decay_steps=3", "optim.lr_decay_tokens=1e6"], [DEEP, "optim.lr_decay_steps=4"],
    [DEEP, "pp=8", "vpp=1", "layout=Et*3|(tt|)*29,m|L"], [DEEP, "model.moe_router_topk=0"], [DEEP, "tp=7"],
    [DEEP, "+scale=smoke", "gbs=abc"], [DEEP, "+scale=smoke", "gbs=7"], [DEEP, "+scale=smoke", "gbs=0"],
    [QUICK, "optim.min_loss_scale=1000000000000000000"], [QUICK, "data.chat_template=0"],
    [QUICK, "parallel.fp16=true", "optim.min_loss_scale=1e18"], [QUICK, "model.transformers=0"],
    [QUICK, "optim.lr=" + "9" * 400],
] + [
    [*FOUR, *typed.split()]
    for typed in (
        "vpp=2 pipeline.pp_schedule=zb_h1", "vpp=2 pipeline.pp_schedule=zb_h2", "vpp=3 pipeline.pp_schedule=dualpipev",
        "vpp=1 pipeline.pp_schedule=zbv_zero_bubble", "vpp=3 pipeline.pp_schedule=v_half",
        "layout=Ettt|ttt|ttt|tttL pipeline.pp_schedule=v_min",
        "gbs=3 pipeline.pp_schedule=dualpipev", "mbs=4 pipeline.pp_schedule=dualpipev",
        "pipeline.pp_batch_size=4 pipeline.pp_schedule=dualpipev",
        "pipeline.pp_schedule=auto pipeline.schedule_memory=0.05",
        "vpp=2 pipeline.pp_schedule=auto pipeline.schedule_memory=0.05",
        "pipeline.pp_schedule=auto pipeline.put_off_limit=2", "pipeline.pp_schedule=1f1b pipeline.put_off_limit=2",
        "pipeline.pp_schedule=1f1b pipeline.schedule_memory=2", "pipeline.pp_schedule=auto pipeline.extra_warmup=1",
        "pipeline.pp_schedule=zb_h1 train.compile=true", "pipeline.pp_schedule=auto train.compile=true",
        "pipeline.pp_schedule=auto launch.device_memory=40MiB launch.memory_reserve=0MiB",
        OVERLAP, DELAY, f"{OVERLAP} {DELAY}",
    )
] + [
    [*EXPERTS, *typed.split()]
    for typed in (
        f"{OVERLAP} pipeline.pp_schedule=zb_h1", f"{OVERLAP} pipeline.pp_schedule=v_half",
        f"{OVERLAP} pipeline.pp_schedule=auto", f"{OVERLAP} vpp=2 pipeline.pp_schedule=gpipe", DELAY,
        f"launch.device=cpu {OVERLAP} parallel.batch_p2p_comm=true parallel.overlap_p2p_comm=false",
        f"launch.device=cpu {OVERLAP} pipeline.extra_warmup=2",
        "launch.transport=plain pipeline.p2p_capacity=4",
        "launch.transport=channels parallel.batch_p2p_comm=true parallel.overlap_p2p_comm=false",
    )
]  # fmt: skip


@pytest.mark.parametrize("typed", WRONG, ids=lambda typed: " ".join(typed)[:60].encode("unicode_escape").decode())
def test_a_remedy_works_when_it_is_typed(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = problems(typed)
    assert before
    for problem in before:
        leave_out = "leave it out" in problem.message
        assert problem.remedy or leave_out, problem
        for line in problem.remedy.splitlines():
            words = shlex.split(line)
            if words[0] == "ppctl":
                assert main(words[1:]) == 0, problem
                continue
            after = problems(mended(typed, problem, words))
            told = {(other.code, other.message) for other in before}
            assert (problem.code, problem.message) not in {(p.code, p.message) for p in after}, problem
            assert {(p.code, p.message) for p in after} <= told, (problem, after)
