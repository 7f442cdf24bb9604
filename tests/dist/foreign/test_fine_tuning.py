"""The page on fine-tuning, from a directory and conversations to adapters that peft loads, by its commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from chats import CHATML, chat, tokenizer_directory
from foreign_models import model_of

from ppctl.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_of("Llama").save_pretrained("base")
    tokenizer_directory(tmp_path / "base", CHATML)
    words = random.Random(1)
    lines = [
        chat(("user", "q" * words.randrange(1, 9)), ("assistant", "yes " * words.randrange(1, 4))) for _ in range(64)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


TYPED = [
    "model.from=base", "model.implementation=transformers", "model.lora.rank=4", "model.lora.targets=[q_proj,v_proj]",
    "data.format=chat", "data.path=chat.jsonl", "seq=60", "pp=2", "steps=4", "gbs=4", "optim.lr=0.01",
    "launch.device=cpu", "launch.gpus_per_node=2",
]  # fmt: skip


@pytest.mark.timeout(400)
def test_from_a_directory_and_conversations_to_adapters_that_peft_loads(home: Path, capfd: pytest.CaptureFixture[str]):
    import peft
    from transformers import AutoModelForCausalLM

    assert main(["data", "show", "chat.jsonl", "--format", "chat", "--tokenizer", "base"]) == 0
    shown = capfd.readouterr().out
    assert "  <|im_start|>assistant\\n\n+ yes" in shown and "+ <|im_start|>" not in shown
    assert main(["plan", *TYPED, "model.lora.dropout=1"]) == 2
    assert "dropout=1 is no number from 0 to below 1" in capfd.readouterr().err
    assert main(["plan", *(word.replace("[q_proj,v_proj]", "[lm_head]") for word in TYPED)]) == 2
    assert "lm_head is outside the decoder layers, as lm_head; these have down_proj, " in capfd.readouterr().err
    assert main(["train", *TYPED, "model.lora.dropout=0.1"]) == 0
    (run,) = Path("runs", "run").iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "loss_tokens" in line]
    assert steps[-1]["loss"] < steps[0]["loss"] and 0 < steps[0]["loss_tokens"] < 240
    assert main(["ckpt", "export", "--hf", str(run), "adapter"]) == 0
    assert json.loads(Path("adapter", "adapter_config.json").read_text())["lora_dropout"] == 0.1
    base = AutoModelForCausalLM.from_pretrained("base")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = base(tokens).logits
        after = peft.PeftModel.from_pretrained(base, "adapter")(tokens).logits
    assert not torch.equal(before, after)
