"""The step/state contract: chunking, padding, company in the batch and row moves are all invisible."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mocha_model import config as presets
from mocha_model.emissions import Emission
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
    for _ in range(50):
        _, state = lively.step(audio(1), torch.tensor([NUM_SAMPLES]), state)
        assert state_bytes(state) == size


def test_flush_returns_fresh_rows(lively: Recognizer, whole: list[list[Emission]]):
    samples = audio(1)
    _, state = lively.step(samples, torch.tensor([NUM_SAMPLES]), lively.init_state(1))
    _, state = lively.flush(state, torch.tensor([True]))
    again, state = lively.step(samples, torch.tensor([NUM_SAMPLES]), state)
    rest, _ = lively.flush(state, torch.tensor([True]))
    assert key(again[0] + rest[0]) == key(whole[0])


@pytest.mark.parametrize("preset", ["wsj_mocha", "small", "tiny"])
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
    assert config.encoder.lstm_sizes == (256, 256, 256) and config.attention.size == 128
    assert SpeechModel(config).decoder.embedding.embedding_dim == 64


def test_segments_end_after_silence_and_text_goes_on(lively: Recognizer):
    tokenizer = Tokenizer(lively.tokenizer.symbols)
    assert tokenizer.vocab_size == lively.config.vocab_size
    speech = audio(1)[0]
    emissions = lively.transcribe(torch.cat([speech, torch.zeros(10 * 16_000), speech]))
    frames = [e.frame for e in emissions]
    assert frames == sorted(frames), "emissions never go back in time"
    assert emissions[-1].end_of_segment
