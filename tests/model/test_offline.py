"""Soft decoding, models without an online process, and attention over a memory that is not speech."""

import importlib.util
from pathlib import Path

import pytest
import torch

from mocha_model.checkpoint import CheckpointError, save_checkpoint
from mocha_model.config import AttentionConfig, tiny
from mocha_model.model import SpeechModel
from mocha_model.offline import decode_softly
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "number_words.py"


@torch.inference_mode()
def test_soft_decoding_feeds_back_what_it_reads(lively: Recognizer):
    model = lively.model
    memory, lengths = torch.randn(3, 12, 16), torch.tensor([12, 7, 12])
    together = decode_softly(model.decoder, memory, lengths)
    for row in range(3):
        length = int(lengths[row])
        (alone,) = decode_softly(model.decoder, memory[row : row + 1, :length], lengths[row : row + 1])
        assert together[row] == alone
        tokens = torch.tensor([[*alone, Tokenizer.eos_id]])
        out = model.teacher_forced(
            memory[row : row + 1], lengths[row : row + 1], tokens, torch.tensor([len(alone) + 1])
        )
        logits = out.logits[0]
        logits[:, [Tokenizer.blank_id, Tokenizer.sos_id, Tokenizer.unk_id]] = -torch.inf
        assert logits.argmax(1).tolist()[: len(alone)] == alone


def test_softmax_attention_cannot_be_streamed(tmp_path: Path):
    tokenizer = Tokenizer.from_texts(["ab"])
    config = tiny(tokenizer.vocab_size).with_attention(mechanism="softmax")
    save_checkpoint(tmp_path / "soft.safetensors", SpeechModel(config), tokenizer, {})
    with pytest.raises(CheckpointError, match="softmax attention is offline"):
        Recognizer.load(tmp_path / "soft.safetensors")


def test_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="mechanism"):
        tiny(30).with_attention(mechanism="location")
    assert tiny(30).with_attention(chunk_width=8).attention == AttentionConfig(size=12, chunk_width=8)


def test_any_memory():
    spec = importlib.util.spec_from_file_location("number_words", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    trained = {name: example.train(name, steps=200) for name in ("softmax", "monotonic", "mocha")}
    assert example.accuracy(*trained["softmax"], online=False) > 0.95
    assert example.accuracy(*trained["mocha"], online=True) > 0.95
    assert example.accuracy(*trained["monotonic"], online=True) < 0.8  # it cannot look back
