"""Chat templates in the documented formats of model families, chats, and small tokenizers.

In a template, ⟦ and ⟧ stand where Hugging Face's templates have ``{% generation %}`` and
``{% endgeneration %}``.
"""

from __future__ import annotations

import functools
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
_CODE = "def f(x):\n    if x:\n        return [\n            x,\n        ]\n    return None"


def said(*texts: Any) -> list[dict[str, Any]]:
    """Returns a chat of a user and an assistant."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


_SYSTEM = [{"role": "system", "content": "Be brief."}]
_PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "one?"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": said("Who are you?", "A pirate."),
    "system": [*_SYSTEM, *said("Who are you?", "A pirate.", "Why?", "Arr!")],
    "several turns": said("hi", "<b>hi</b>", "and you?", "well", "good", "yes\n"),
    "code": said("Write f.", f"Here:\n\n```\n{_CODE}\n```", "Shorter.", _CODE),
    "spaces": said("Continue.", "  and so on", "More.", "\n\nthen\n\n\n"),
    "tool": [
        *_SYSTEM,
        *said("Is it warm?"),
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "name": "weather", "content": "21 °C"},
        {"role": "assistant", "content": "Yes, 21 °C."},
        *said("Thanks", "None to thank."),
    ],
    "parts": said(_PARTS, [{"type": "text", "text": "It is "}, {"type": "text", "text": "1."}]),
    "other letters": said("Grüße, 你好?", "你好 🙂 – çà et là…", "ß?", "ﬁ ½ é"),
}

_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}⟦{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}⟧{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content if m.content is string else '' %}"
    "{% set why = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}⟦{% if loop.index0 > ns.last and (loop.last or why) %}"
    "{{ '<think>\n' + why.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}{% else %}"
    "{{ text }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}⟧{{ '\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}{% if m.role == 'assistant' %}{{ ' ' }}⟦{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ ' ' + eos_token }}⟧"
    "{% else %}{{ bos_token + '[INST] ' }}{% if loop.first and system %}"
    "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content | trim }}{{ ' [/INST]' }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}⟦{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '{\"name\": ' + (c.function.name | tojson) + ', \"parameters\": ' }}"
    "{{ (c.function.arguments | tojson) + '}' }}{% endfor %}{% else %}{{ m.content | trim }}"
    "{% endif %}{{ '<|eot_id|>' }}⟧{% else %}{{ (m.content | trim) + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' }}⟦{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ eos_token }}⟧"
    "{% elif m.role == 'system' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
_MISTRAL3 = (  # the system's message stands in the last turn of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in rest %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools is not none and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% if system is defined and loop.index0 == ns.last %}"
    "{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% elif m.tool_calls %}⟦{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{{ ']' + eos_token if loop.last else ', ' }}{% endfor %}⟧"
    "{% elif m.role == 'assistant' %}{{ ' ' }}⟦{{ m.content + eos_token }}⟧"
    "{% else %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}"
    "{{ '\n' + (system if loop.first else '') }}{% set text = namespace(all='') %}"
    "{% if m.content is string %}{% set text.all = m.content | trim %}"
    "{% elif m.content is iterable %}{% for p in m.content %}{% if p.type == 'text' %}"
    "{% set text.all = text.all + p.text %}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}⟦{{ text.all }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}{{ '<end_of_turn>' }}⟧"
    "{% else %}{{ text.all + '<end_of_turn>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "⟦{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ '<|end|>' }}⟧"
    "{{ '\n' }}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|User|>' + m.content }}{% elif m.role == 'tool' %}{{ '<|tool|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{% set text = m.content %}"
    "{% if text and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' }}⟦{{ text }}{% for c in m.tool_calls or [] %}"
    "{{ '<|call|>' + c.function.name + '\n' + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ eos_token }}⟧{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "⟦{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ eos_token }}⟧"
    "{{ '\n' }}{% else %}{{ m.content + eos_token + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
_COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}⟦{% if m.content %}{{ m.content | trim }}"
    "{% endif %}{% if m.tool_calls %}"
    "{{ 'Action: ' + (m.tool_calls | tojson(indent=4)) }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}⟧{% else %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>' }}"
    "{{ (m.content | trim) + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}⟦"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ ' to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ '<|call|>' }}"
    "{% else %}{% if m.thinking and loop.last %}"
    "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ '<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}⟧"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
FAMILIES = {
    "ChatML": _CHATML,
    "Qwen 3": _QWEN3,
    "Llama 2": _LLAMA2,
    "Llama 3": _LLAMA3,
    "Mistral 1": _MISTRAL1,
    "Mistral 3": _MISTRAL3,
    "Gemma": _GEMMA,
    "Phi 3": _PHI3,
    "DeepSeek R1": _R1,
    "Zephyr": _ZEPHYR,
    "Command R": _COMMAND_R,
    "Harmony": _HARMONY,
}


def template_of(family: str, begin: str = "", end: str = "") -> str:
    """Returns the template of a family, with marks around what it generates."""
    return FAMILIES[family].replace("⟦", begin).replace("⟧", end)


MARKS = ("{% generation %}", "{% endgeneration %}")

TOKENIZERS = (
    "bytes, trimmed offsets",
    "bytes",
    "bytes, space in front",
    "Metaspace with bytes",
    "WordPiece",
    "Unigram",
)
SPECIAL = (
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>"),
    *("<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|User|>"),
    *("<|Assistant|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|start|>", "<|channel|>", "<|message|>"),
    *("<|return|>", "<|call|>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
)


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Returns a small tokenizer of the package tokenizers, trained on the chats."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = [str(m["content"]) for chat in CHATS.values() for m in chat] * 3
    texts += ["assistant\nuser\nsystem\n", "  \n\n\t    \n        x", str(TOOLS), str(_CALL)] * 3
    letters = pre_tokenizers.ByteLevel.alphabet()
    named: dict[str, Any] = {"special_tokens": list(SPECIAL), "show_progress": False}
    if name.startswith("bytes"):
        result = tokenizers.Tokenizer(models.BPE())
        space = name.endswith("space in front")
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        trims = name.endswith("trimmed offsets")
        result.post_processor = processors.ByteLevel(trim_offsets=trims, add_prefix_space=space)
        result.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=480, initial_alphabet=letters, **named)
    elif name == "WordPiece":
        result = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        result.normalizer = normalizers.BertNormalizer(lowercase=False)
        result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, **named)
    elif name == "Unigram":
        result = tokenizers.Tokenizer(models.Unigram())
        result.normalizer = normalizers.NFKC()
        result.pre_tokenizer = pre_tokenizers.Metaspace()
        result.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", **named)
    else:
        result = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        result.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        named["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=500, **named)
    result.train_from_iterator(texts, trainer)
    return result


def read_examples(rows: Any, tokenizer: Any, train_on: str, max_length: int) -> list[Any]:
    """Returns the rows of a data set as examples."""
    from ortops.llm.row_kinds import Sequences

    folder: Any = None
    kind = Sequences(folder, tokenizer, None)
    return [example for (example,) in kind.read(rows, max_length, train_on)]
