"""The functions of `ppctl.megatron` and `run_schedule`, under their earlier import path."""

from ppctl import megatron
from ppctl.engine.interpreter import Engine, EngineError, run_schedule
from ppctl.engine.pace import Heartbeat
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.megatron import *  # noqa: F403

__all__ = ["Engine", "EngineError", "Heartbeat", "Recorder", "StageProgram", "run_schedule", *megatron.__all__]
