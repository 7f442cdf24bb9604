"""Environment variables that a rank on a GPU needs when CUDA and cuBLAS start.

The launcher sets missing variables, and every rank checks its own environment again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ppctl.config.parallel_rules import TRANSPORT, is_plain
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem
from ppctl.host.devices import MOST_QUEUES, QUEUES, SEVERAL_RANKS, why_one_queue_blocks

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")
"""The settings with which cuBLAS is reproducible to the bit. Source: its documentation."""
LOADING = "CUDA_MODULE_LOADING"
_EAGER = "EAGER"
"""CUDA loads a kernel at its first launch, and waits until the device is idle: with receives posted, two ranks that
load at the same time may wait for each other. Every stage runs once before the first step, but the sizes of experts and
packed documents change from step to step, and libraries choose kernels by sizes."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's two names for its allocator's settings: it reads only the first that is set."""
EXPANDABLE = "expandable_segments:True"
"""Blocks of any size come out of one range of addresses, so that fragmentation rarely makes torch's allocator free
memory; if it does, it waits for its own stream and not for the whole device."""
REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""Lets NCCL register every block of the allocator, which torch does not do for expandable segments."""
_BACKEND = "parallel.pipeline_model_parallel_comm_backend"


def gpu_environment(
    config: RunConfig, pp: int, environ: Mapping[str, str], launch_env: Mapping[str, str], *, routed: bool
) -> tuple[dict[str, str], list[Problem]]:
    """(`launch_env` and the missing variables that a rank on a GPU needs, problems of wrongly set ones). `environ` is
    what ranks inherit; `launch_env` is stronger. `routed`: whether the model, in any code, has routed experts."""
    added = dict(launch_env)
    if QUEUES not in environ:
        added.setdefault(QUEUES, MOST_QUEUES)
    if config.parallel.deterministic_mode and WORKSPACES not in environ:
        added.setdefault(WORKSPACES, _REPEATABLE[0])
    if loads_all_kernels(config, pp, routed=routed) and LOADING not in environ:
        added.setdefault(LOADING, _EAGER)
    if _set_by_user(ALLOCATOR, environ, added) is None and not _registers(environ, added):
        added[ALLOCATOR[1]] = EXPANDABLE
    problems = list(_problems(config, pp, environ, added))
    if added.get(SEVERAL_RANKS, environ.get(SEVERAL_RANKS)) != "1":
        problems += _backend_of_shared_gpus(config, f"{SEVERAL_RANKS}=1 is not set")
    return added, problems


def loads_all_kernels(config: RunConfig, pp: int, *, routed: bool) -> bool:
    """Whether ranks load all kernels when they start: a later microbatch may need other kernels than the dry pass,
    because of its experts, documents or padding, or because some steps are computed twice or recorded."""
    varies = config.data.reset_attention_mask or config.parallel.variable_seq_lengths or routed
    in_some_steps = config.train.replay > 0 or config.log.gradients is not None
    # Transformers' code looks at the mask.
    return pp > 1 and (varies or in_some_steps or config.model.transformers is not None)


def kept_allocator(environ: Mapping[str, str], launch_env: Mapping[str, str]) -> str | None:
    """A note on the user's settings of torch's allocator if they lack what ppctl would set."""
    setting = _set_by_user(ALLOCATOR, environ, launch_env)
    if setting is None or _expands(setting[1]):
        return None
    return f"note: {setting[0]}={setting[1]} is kept; without it ppctl sets {EXPANDABLE} (ppctl explain PP-E822)"


def expanding(environ: Mapping[str, str]) -> str | None:
    """The override that sets `EXPANDABLE` for ranks; None if it is set already, or NCCL registers blocks."""
    name, value = _set_by_user(ALLOCATOR, environ, {}) or (ALLOCATOR[1], "")
    return None if _expands(value) or _registers(environ, {}) else f"launch.env.{name}={EXPANDABLE}"


def _expands(settings: str) -> bool:
    return EXPANDABLE in settings.replace(" ", "")


def _registers(environ: Mapping[str, str], launch_env: Mapping[str, str]) -> bool:
    setting = _set_by_user((REGISTERS,), environ, launch_env)
    return setting is not None and setting[1].lower() in ("1", "t", "true", "y", "yes")


def _set_by_user(
    names: Sequence[str], environ: Mapping[str, str], launch_env: Mapping[str, str]
) -> tuple[str, str] | None:
    """(name, value) of the first of `names` that is set for ranks, or None; `launch_env` is stronger."""
    return next(((name, where[name]) for name in names for where in (launch_env, environ) if name in where), None)


def refuse_backend(config: RunConfig, backends: str, nccl: tuple[int, ...] | None) -> None:
    """Raise ConfigError (PP-E642) if ranks share a GPU, `backends` lack NCCL, and the config asks for NCCL."""
    if "nccl" not in backends:
        version = ".".join(map(str, nccl or ()))
        problems = _backend_of_shared_gpus(
            config, f"NCCL {version} is older than 2.30.7, or {SEVERAL_RANKS}=1 is not set"
        )
        if problems:
            raise ConfigError(problems)


def _backend_of_shared_gpus(config: RunConfig, why: str) -> list[Problem]:
    asked = config.parallel.pipeline_model_parallel_comm_backend
    if not config.launch.share_gpu or asked in (None, "gloo"):
        return []
    message = f"launch.share_gpu=true lets ranks share a GPU, but {asked} connects only one rank per GPU ({why})"
    return [Problem("PP-E642", message, f"{_BACKEND}=null", f"{_BACKEND} = {asked}")]


def kept_queue(config: RunConfig, pp: int, environ: Mapping[str, str], launch_env: Mapping[str, str]) -> str | None:
    """A note on a single hardware queue, with which channels would block but `plain` does not."""
    blocks = why_one_queue_blocks(pp, launch_env.get(QUEUES, environ.get(QUEUES)))
    if blocks is None or not is_plain(config):
        return None
    return f"note: {QUEUES}=1 is kept: plain messages are not received ahead; {TRANSPORT}=channels would refuse it"


def _problems(
    config: RunConfig, pp: int, environ: Mapping[str, str], launch_env: Mapping[str, str]
) -> Iterator[Problem]:
    deterministic = config.parallel.deterministic_mode
    message = why_one_queue_blocks(pp, launch_env.get(QUEUES, environ.get(QUEUES)))
    if message is not None and not is_plain(config):
        if QUEUES in launch_env:
            yield Problem("PP-E608", message, f"launch.env.{QUEUES}={MOST_QUEUES}", f"launch.env.{QUEUES} = 1")
        else:
            yield Problem("PP-E608", message, f"unset {QUEUES}", "environment")
    workspaces = launch_env.get(WORKSPACES, environ.get(WORKSPACES))
    if deterministic and workspaces not in _REPEATABLE:
        message = (
            f"parallel.deterministic_mode needs {WORKSPACES} to be {' or '.join(_REPEATABLE)}, but it is {workspaces}"
        )
        place = f"launch.env.{WORKSPACES} = {workspaces}" if WORKSPACES in launch_env else "environment"
        yield Problem("PP-E609", message, f"launch.env.{WORKSPACES}={_REPEATABLE[0]}", place)
