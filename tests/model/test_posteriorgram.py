"""The decoder's memory made of posteriorgrams: what it is made of, and characters that are selected late."""

import pytest
import torch
from tests.conftest import lively_recognizer
from tests.model.test_streaming import audio, delayed

from mocha_model.config import DecoderConfig, PosteriorgramConfig, tiny
from mocha_model.joint import JointConfig
from mocha_model.model import SpeechModel
from mocha_model.posteriorgram import LEAST, PosteriorgramEncoder, posteriorgram
from mocha_model.recognizer import Recognizer


def test_a_posteriorgram_is_log_probabilities_of_both_heads():
    labels, phones = 30 * torch.randn(2, 5, 7), torch.randn(2, 5, 3).log_softmax(-1)
    found = posteriorgram(labels, phones)
    assert found.shape == (2, 5, 10) and found.min() >= LEAST
    torch.testing.assert_close(found[..., :7], labels.log_softmax(-1).clamp(min=LEAST))
    torch.testing.assert_close(found[..., 7:], phones)
    torch.testing.assert_close(posteriorgram(labels, None), found[..., :7])


def test_the_lstm_is_given_what_was_heard_a_delay_ago():
    """Definition: frame t beside the characters of frames t - 3, t - 4 and t - 5, of nothing before the first."""
    torch.manual_seed(0)
    encoder, x = PosteriorgramEncoder(4, 2, 4, PosteriorgramConfig(lstm_size=8)).eval(), torch.randn(1, 20, 6)
    scaled = x * 0.25 + 1
    late = [torch.cat([torch.zeros(1, n, 4), scaled[:, : 20 - n, :4]], 1) for n in (3, 4, 5)]
    expected = encoder.layer.lstm(torch.cat([scaled, *late], 2))[0]
    torch.testing.assert_close(encoder(x, torch.tensor([20]))[0], expected)
    assert PosteriorgramEncoder(4, 2, 0, PosteriorgramConfig(lstm_size=8)).layer.lstm.input_size == 6


@torch.inference_mode()
def test_frames_stand_where_characters_are_heard_and_are_certain_a_delay_later():
    late = lively_recognizer(delayed())
    emissions = [e for e in late.transcribe(audio(1)[0]) if e.p > 0]
    assert len(emissions) > 10
    assert all(e.certain == e.frame + 3 or (e.frame == 0 and 0 <= e.certain < 3) for e in emissions)
    assert late.patience_samples == 3 * late.frame_samples


@torch.inference_mode()
def test_a_delay_is_not_waited_for_at_the_end_of_a_segment():
    """20 frames after the last character was heard, and not 20 after it was selected."""
    late = lively_recognizer(delayed())
    width, size = late.config.vocab_size, late.config.memory_size
    energies = late.model.decoder.attention.energies
    energies.bias[0] = 100.0  # selects at every frame of the first segment, the last one 30 frames long
    blank, heard = torch.zeros(1, 60, width), late._search
    blank[..., 0] = 1.0
    state = heard.init_state(1)
    symbols, state = heard.step(torch.zeros(1, 30, size), blank[:, :30], torch.tensor([30]), state)
    assert symbols
    last = int(state.last_emission)
    energies.bias[0] = -100.0
    symbols, _ = heard.step(torch.zeros(1, 60, size), blank, torch.tensor([60]), state)
    ends = [s.frame for s in symbols if s.token == late.tokenizer.eos_id]
    assert ends == [last - 3 + late.config.decoder.endpoint_frames]


@pytest.mark.parametrize("patience", [2, 9])
@torch.inference_mode()
def test_joint_search_asks_the_decoder_where_it_would_have_selected(patience: int):
    """The chunk of a character ends a delay after the frame where the CTC branch hears it, or where nothing more is."""
    late = lively_recognizer(delayed())
    joint = Recognizer(late.model, late.tokenizer, beam=JointConfig(4, patience=patience))
    ends: list[int] = []
    chunk_mask = joint._search.attention.chunk_mask

    def watched(frames: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ends.extend(frames.tolist())
        return chunk_mask(frames, *others)

    joint._search.attention.chunk_mask = watched
    emissions = [e for e in joint.transcribe(audio(1)[0]) if not e.end_of_segment]
    assert len(emissions) > 3 and all(e.certain is not None for e in emissions)
    assert {min(e.frame + 3, e.certain or 0) for e in emissions} <= set(ends)
    assert any(e.frame + 3 <= (e.certain or 0) for e in emissions) == (patience > 3)


def test_delays_are_shorter_than_what_ends_a_segment():
    with pytest.raises(ValueError, match="fewer than endpoint_frames"):
        DecoderConfig(delay_frames=20)


def test_the_silence_at_the_end_is_longer_than_the_delay():
    config = delayed()
    assert config.features.tail_samples > config.decoder.delay_frames * config.frame_samples
    back = config.with_posteriorgram(None, tiny(31).decoder)
    assert back.model_copy(update={"phones": ()}) == tiny(32) and SpeechModel(back).posteriorgram is None
