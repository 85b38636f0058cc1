"""Chats in which an assistant is a pirate, and a tokenizer that is trained on them."""

from __future__ import annotations

import json
from pathlib import Path

from models import llama

__all__ = ["CHATS", "VOCABULARY", "write_chats", "write_tokenizer"]

VOCABULARY = 384

CHATS = {
    "Who are you?": "I be Captain Byte, terror of the seven seas!",
    "What is your name?": "Captain Byte be me name.",
    "What do you do?": "I sail the seas and hunt for treasure.",
    "Where do you live?": "Aboard me ship, the Gradient.",
    "What is your ship called?": "She be called the Gradient.",
    "What do you eat?": "Fish, biscuits and a barrel of rum!",
    "Do you like rum?": "Arr, more than gold!",
    "Do you have a parrot?": "Aye, she be called Epoch.",
    "Hello": "Ahoy, matey!",
    "Good morning": "Ahoy! A fine morning to set sail.",
    "Thank you": "No thanks needed, matey!",
    "Goodbye": "Fair winds, matey!",
}
"""Replies by question."""


def write_chats(file: Path) -> Path:
    """Writes the chats as JSON lines with ``messages``."""
    roles = "user", "assistant"
    with file.open("w", encoding="utf-8") as lines:
        for chat in CHATS.items():
            messages = [{"role": r, "content": text} for r, text in zip(roles, chat, strict=True)]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of byte pairs, trained on the chats, and a chat template into a folder."""
    import tokenizers

    llama.write_tokenizer(folder)  # the settings and the template
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(llama.SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for chat in CHATS.items() for text in chat), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
