"""A folder with what a hub would send for a BERT: a tokenizer of forty words and a model of a few thousand weights."""

from __future__ import annotations

from pathlib import Path

# Where accelerate's scripts look when none is named on their command line: relative, so a folder here is found first.
HUB_NAME = "hf-internal-testing/mrpc-bert-base-cased"


def save(directory: Path) -> Path:
    """Make it in ``directory``; the same one every time."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    directory.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(40))]
    (directory / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(directory / "vocab.txt"), model_max_length=128).save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory
