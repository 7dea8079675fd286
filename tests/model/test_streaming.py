"""The step/state contract: chunking, padding, company in the batch and row moves are all invisible."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.conftest import lively_recognizer

from mocha_model import config as presets
from mocha_model.emissions import Emission
from mocha_model.encoder import LSTMLayer
from mocha_model.features import LogMel
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.streaming import gather_rows, map_state, scatter_rows, state_bytes
from mocha_model.tokenizer import Tokenizer

NUM_SAMPLES = 40_000


def audio(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    envelope = (torch.arange(NUM_SAMPLES) / 3000).sin().abs() * 0.2
    return torch.randn(rows, NUM_SAMPLES, generator=generator) * envelope


def key(emissions: list[Emission]) -> list[tuple[str, int, bool]]:
    return [(e.text, e.frame, e.end_of_segment) for e in emissions]


def skipping() -> presets.ModelConfig:
    """In the shape of `timit`: no convolutions, plain LSTM layers with time reduction, energy, hard attention."""
    like = presets.timit(32)
    return like.model_copy(
        update={
            "features": like.features.model_copy(update={"num_mels": 16}),
            "encoder": like.encoder.model_copy(update={"lstm_sizes": (24, 20, 16)}),
            "decoder": like.decoder.model_copy(update={"embedding_size": 8, "lstm_size": 16}),
        }
    )


LOOKING_AHEAD = presets.EncoderConfig(
    conv_channels=(), num_conv_lstm_layers=0, lstm_sizes=(24, 20, 16), projection_size=None, look_ahead=2
)


NETWORKS = {
    "every kind of layer": lambda: None,
    "looking ahead": lambda: presets.tiny(32).with_look_ahead(2),
    "time reduction": skipping,
}


@pytest.fixture(scope="module", params=NETWORKS)
def lively(request: pytest.FixtureRequest) -> Recognizer:
    return lively_recognizer(NETWORKS[request.param]())


@pytest.fixture(scope="module")
def whole(lively: Recognizer) -> list[list[Emission]]:
    found = [lively.transcribe(row) for row in audio(3)]
    assert all(len(row) > 10 for row in found), "the test model must emit something to be worth testing"
    return found


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_any_chunking_gives_the_same_emissions(lively: Recognizer, whole: list[list[Emission]], data: st.DataObject):
    samples, state = audio(3), lively.init_state(3)
    at, found = [0, 0, 0], [list[Emission]() for _ in range(3)]
    cuts = data.draw(st.lists(st.tuples(*[st.sampled_from([0, 1, 160, 592, 4000, 9000])] * 3), max_size=12))
    for sizes in [*cuts, (NUM_SAMPLES,) * 3]:
        num = [min(size, NUM_SAMPLES - start) for size, start in zip(sizes, at, strict=True)]
        piece = torch.full((3, max(num) + 7), 0.9)  # garbage in the padding must not matter
        for row, (n, start) in enumerate(zip(num, at, strict=True)):
            piece[row, :n] = samples[row, start : start + n]
            at[row] += n
        emissions, state = lively.step(piece, torch.tensor(num), state)
        for row, more in zip(found, emissions, strict=True):
            row += more
    rest, _ = lively.flush(state, torch.ones(3, dtype=torch.bool))
    assert [key(row + more) for row, more in zip(found, rest, strict=True)] == [key(row) for row in whole]


def test_step_neither_changes_its_state_nor_idle_rows(lively: Recognizer):
    state = lively.init_state(2)
    _, state = lively.step(audio(2)[:, :9000], torch.tensor([9000, 5000]), state)
    before = map_state(torch.clone, state)
    _, after = lively.step(audio(2)[:, 9000:20000], torch.tensor([11000, 0]), state)

    def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert torch.equal(a, b)
        return a

    map_state(same, before, state)
    idle = torch.tensor([1])
    map_state(same, gather_rows(after, idle), gather_rows(state, idle))


def test_rows_move_through_a_pool(lively: Recognizer, whole: list[list[Emission]]):
    pool, samples = lively.init_state(8), audio(1)
    found: list[Emission] = []
    row = torch.tensor([6])
    for start in range(0, NUM_SAMPLES, 5000):
        emissions, state = lively.step(samples[:, start : start + 5000], torch.tensor([5000]), gather_rows(pool, row))
        found += emissions[0]
        scatter_rows(pool, row, state)
    rest, _ = lively.flush(gather_rows(pool, row), torch.tensor([True]))
    assert key(found + rest[0]) == key(whole[0])


def test_state_does_not_grow(lively: Recognizer):
    state = lively.init_state(1)
    size = state_bytes(state)
    for _ in range(15):
        _, state = lively.step(audio(1), torch.tensor([NUM_SAMPLES]), state)
        assert state_bytes(state) == size


def test_flush_returns_fresh_rows(lively: Recognizer, whole: list[list[Emission]]):
    samples = audio(1)
    _, state = lively.step(samples, torch.tensor([NUM_SAMPLES]), lively.init_state(1))
    _, state = lively.flush(state, torch.tensor([True]))
    again, state = lively.step(samples, torch.tensor([NUM_SAMPLES]), state)
    rest, _ = lively.flush(state, torch.tensor([True]))
    assert key(again[0] + rest[0]) == key(whole[0])


@pytest.mark.parametrize("preset", ["wsj_mocha", "timit", "small", "tiny"])
def test_training_forward_equals_streaming_step(preset: str):
    torch.manual_seed(0)
    model = SpeechModel(getattr(presets, preset)(30)).eval()
    samples, lengths = audio(3)[:, :20_000], torch.tensor([20_000, 7_000, 13_111])
    with torch.no_grad():
        frames, num_frames = model.features(samples, lengths)
        memory, num_memory = model.encode(frames, num_frames)
        stepped, num_out, _ = model.encoder.step(frames, num_frames, model.encoder.init_state(3))
    assert num_memory.tolist() == num_out.tolist()
    for row, length in enumerate(num_memory.tolist()):
        torch.testing.assert_close(memory[row, :length], stepped[row, :length], rtol=1e-4, atol=1e-5)


def test_wsj_network_has_the_papers_sizes():
    config = presets.wsj_mocha(32)
    assert config.features.num_features == 240 and config.encoder.subsampling == 4
    assert (config.attention.mechanism, config.attention.chunk_width) == ("mocha", 2)
    assert presets.wsj_monotonic(32) == config.with_attention(mechanism="monotonic")
    assert config.encoder.lstm_sizes == (256, 256, 256) and config.attention.size == 128
    assert (config.attention.energy, config.attention.alpha) == ("normalized", "exact")
    model = SpeechModel(config)
    assert model.decoder.embedding.embedding_dim == 64 and model.decoder.cell.hidden_size == 256
    assert model.decoder.attention.energies.bias.tolist() == [-4.0, 0.0]
    filters = [layer for layer in model.encoder.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert filters[0].kernel_size == (3, 3) and filters[0].out_channels == 32


def test_timit_network_has_the_papers_sizes():
    model = SpeechModel(presets.timit(65)).eval()
    layers = [layer for layer in model.encoder.stack if isinstance(layer, LSTMLayer)]
    assert [(layer.lstm.input_size, layer.lstm.hidden_size) for layer in layers] == [(123, 512), (512, 512), (512, 512)]
    assert model.config.frame_samples == 640  # 40 ms
    assert model.decoder.output.in_features == 256 and model.decoder.embedding.embedding_dim == 30
    assert model.decoder.attention.energies.bias.tolist() == [-1.0]
    assert model.decoder.cell.hidden_size == 256 and model.config.attention.size == 512


def test_time_reduction_skips_every_other_state():
    """Definition: the stack computed layer by layer on whole utterances, with a slice where states are skipped."""
    torch.manual_seed(0)
    model = SpeechModel(skipping()).eval()
    samples, lengths = audio(2)[:, :20_000], torch.tensor([20_000, 7_000])
    with torch.no_grad():
        frames, num_frames = model.features(samples, lengths)
        memory, num_memory = model.encode(frames, num_frames)
        first, second, third = (layer.lstm for layer in model.encoder.stack if isinstance(layer, LSTMLayer))
        for row, length in enumerate(num_frames.tolist()):
            bands_together = frames[row, :length].view(length, 3, 17).transpose(1, 2).flatten(1)
            expected = third(second(first(bands_together)[0][::2])[0][::2])[0]
            assert len(expected) == num_memory[row]
            torch.testing.assert_close(memory[row, : len(expected)], expected)


def test_time_reductions_follow_layers_that_there_are():
    for after in ((0,), (4,), (1, 1)):
        with pytest.raises(ValueError, match="time_reduction_after"):
            presets.EncoderConfig(lstm_sizes=(8, 8, 8), time_reduction_after=after)


def test_looking_ahead_adds_what_comes_later():
    """Definition: layers on whole utterances; between them, to each item a linear map of the one two later."""
    torch.manual_seed(0)
    model = SpeechModel(presets.timit(30).model_copy(update={"encoder": LOOKING_AHEAD})).eval()
    for ahead in model.encoder.look_ahead:
        torch.nn.init.normal_(ahead.later.weight, std=0.3)
    samples, lengths = audio(2)[:, :20_000], torch.tensor([20_000, 7_000])
    with torch.no_grad():
        frames, num_frames = model.features(samples, lengths)
        memory, num_memory = model.encode(frames, num_frames)
        stepped, below, num_out, _ = model.encoder.step_both(frames, num_frames, model.encoder.init_state(2))
        first, second, third = (layer.lstm for layer in model.encoder.stack if isinstance(layer, LSTMLayer))
        after_first, after_second = (ahead.later.weight for ahead in model.encoder.look_ahead)
        for row, length in enumerate(num_frames.tolist()):
            x = first(frames[row, :length].view(length, 3, 41).transpose(1, 2).flatten(1))[0]
            x = second(x[:-2] + x[2:] @ after_first.t())[0]
            x = x[:-2] + x[2:] @ after_second.t()
            expected = third(x)[0]
            assert len(expected) == length - 4 == num_memory[row] == num_out[row]
            torch.testing.assert_close(memory[row, : length - 4], expected)
            torch.testing.assert_close(stepped[row, : length - 4], expected)
            torch.testing.assert_close(below[row, : length - 4], x)


def test_who_looks_ahead_still_hears_the_end():
    """As many frames as without, since silence follows; and those of less than the look-ahead are none at all."""
    found = []
    for frames in (0, 3):
        config = presets.small(30).with_look_ahead(frames)
        assert config.encoder.look_ahead_frames == 2 * frames
        model = SpeechModel(config).eval()
        _, num_memory = model.encode(*model.features(audio(1), torch.tensor([NUM_SAMPLES])))
        found += num_memory.tolist()
        recognizer = Recognizer(model, Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz"]))
        assert recognizer.look_ahead_samples == 2 * frames * 640
    assert found[0] == found[1] > 60
    memory, num_memory = model.encoder(torch.randn(1, 20, 80), torch.tensor([20]))
    assert memory.shape == (1, 0, 320) and num_memory.tolist() == [0]


def test_a_flush_hears_as_many_frames_as_whole_utterances_have(lively: Recognizer):
    samples, heard = audio(1), list[int]()
    _, expected = lively.model.encode(*lively.model.features(samples, torch.tensor([NUM_SAMPLES])))
    with lively.model.ctc.register_forward_hook(lambda _, memory, __: heard.append(memory[0].shape[1])):
        _, state = lively.step(samples, torch.tensor([NUM_SAMPLES]), lively.init_state(1))
        lively.flush(state, torch.tensor([True]))
    assert len(heard) == 2 and sum(heard) == int(expected)


def test_networks_that_skip_states_do_not_look_ahead():
    with pytest.raises(ValueError, match="look_ahead"):
        presets.timit(30).with_look_ahead(2)


def test_features_have_energy_and_are_standardised_with_their_differences():
    config = presets.FeatureConfig(num_mels=16, energy=True, deltas=True, tail_samples=0)
    features, samples = LogMel(config), audio(1)
    length = torch.tensor([NUM_SAMPLES])
    raw, _ = features.raw(samples, length)
    window = samples[0, 800:1200] * torch.hann_window(400, periodic=False)  # frame 5
    assert raw[0, 5, 16] == pytest.approx(float((window.square().sum() + config.floor).log()), abs=1e-4)
    torch.testing.assert_close(raw[0, 5, 17:34], raw[0, 5, :17] - raw[0, 4, :17])
    torch.testing.assert_close(raw[0, 5, 34:], raw[0, 5, 17:34] - raw[0, 4, 17:34])
    features.set_normalization(raw[0].mean(0), raw[0].std(0))
    frames, _ = features(samples, length)
    torch.testing.assert_close(frames[0].mean(0), torch.zeros(51), atol=1e-4, rtol=0)
    torch.testing.assert_close(frames[0].std(0), torch.ones(51), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_segments_end_after_silence_and_text_goes_on():
    recognizer, speech = lively_recognizer(), audio(1)[0]
    recognizer.model.ctc.bias[Tokenizer.blank_id] = 100.0  # hears no characters: what is quiet is for attention to say
    recognizer.model.decoder.attention.energies.bias[0] += 0.5
    emissions = recognizer.transcribe(torch.cat([speech, torch.zeros(10 * 16_000), speech]))
    frames = [e.frame for e in emissions]
    assert frames == sorted(frames), "emissions never go back in time"
    *ends, last = [k for k, e in enumerate(emissions) if e.end_of_segment]
    silence = recognizer.config.decoder.endpoint_frames
    assert ends and [frames[k] for k in ends] == [frames[k - 1] + silence for k in ends]
    assert max(ends) + 1 < last == len(emissions) - 1
