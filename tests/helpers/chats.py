"""Chat templates of three kinds, a tokenizer for them, and by hand which tokens of a conversation are learned."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_SAYS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{- raise_exception('there is no system role') }}"
    "{%- elif m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL] ' + m.content + ' [/TOOL]' }}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
THINKS = CHATML.replace("{{ m.content }}", "{% if loop.last %}<think>{% endif %}{{ m.content }}")
SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST] [TOOL] [/TOOL]"
)


def tokenizer_directory(home: Path, template: str | None, **settings: object) -> Path:
    """A tokenizer whose tokens are marks and single characters, with a template."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: n for n, each in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL.split())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(home / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    (home / "tokenizer_config.json").write_text(json.dumps(marks | settings))
    if template is not None:
        (home / "chat_template.jinja").write_text(template)
    return home


TALK = [("user", "Hi"), ("assistant", "A b"), ("user", "c"), ("assistant", "d")]
WITH_SYSTEM = [("system", "be"), *TALK]

# Each token, and whether it is learned: marks by their names, then character by character.
EXPECTED = {
    "ChatML": (
        CHATML, WITH_SYSTEM,
        "- <|im_start|> - s y s t e m \n b e <|im_end|> - \n <|im_start|> u s e r \n H i <|im_end|> \n"
        " <|im_start|> a s s i s t a n t \n + A _ b <|im_end|> \n - <|im_start|> u s e r \n c <|im_end|> \n"
        " <|im_start|> a s s i s t a n t \n + d <|im_end|> \n",
    ),
    "ChatML with the keyword": (
        CHATML_SAYS, WITH_SYSTEM,
        "- <|im_start|> s y s t e m \n b e <|im_end|> \n <|im_start|> u s e r \n H i <|im_end|> \n"
        " <|im_start|> a s s i s t a n t \n + A _ b <|im_end|> - \n <|im_start|> u s e r \n c <|im_end|> \n"
        " <|im_start|> a s s i s t a n t \n + d <|im_end|> - \n",
    ),
    "Llama 3": (
        LLAMA, WITH_SYSTEM,
        "- <s> <|start_header_id|> s y s t e m <|end_header_id|> \n \n b e <|eot_id|>"
        " <|start_header_id|> u s e r <|end_header_id|> \n \n H i <|eot_id|>"
        " <|start_header_id|> a s s i s t a n t <|end_header_id|> \n \n + A _ b <|eot_id|>"
        " - <|start_header_id|> u s e r <|end_header_id|> \n \n c <|eot_id|>"
        " <|start_header_id|> a s s i s t a n t <|end_header_id|> \n \n + d <|eot_id|>",
    ),
    "Mistral, with a tool": (
        MISTRAL, [*TALK, ("tool", "7"), ("assistant", "e")],
        "- <s> [INST] _ H i _ [/INST] + _ A _ b </s> - [INST] _ c _ [/INST] + _ d </s>"
        " - [TOOL] _ 7 _ [/TOOL] + _ e </s>",
    ),
}  # fmt: skip


def chat(*turns, **more):
    """A line of messages, of (role, content)."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}
