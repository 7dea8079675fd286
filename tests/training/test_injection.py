"""Sentences put together of posteriorgrams of recordings, batches of them, and a decoder that learns from both."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mocha_model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mocha_model.config import DecoderConfig, PosteriorgramConfig, tiny
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.beginnings import started
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, Utterance
from mocha_training.injection import Injection, InjectionConfig, make_injection, slipped
from mocha_training.path import path_losses
from mocha_training.posteriorgrams import Bank, Spoken, after_one_another, hear, kept_posteriorgrams
from mocha_training.recipes import injected, plain
from mocha_training.trainer import Trainer
from tests.training.made_up import said

TEXTS = ["the cat sees a knight", "nobody sees the sea", "a boy", "boys say nothing at night"]
SENTENCES = ["the boy sees", "nothing at sea", "a cat at night says nothing", "the sea"] * 5


def spoken(text: str, mark: int = 0) -> Spoken:
    """Each character for as many frames as its place says, 2 to 4, each frame with its code and `mark`; silences are 0.

    Four frames before it, six after.
    """
    lengths = [2 + n % 3 for n in range(len(text))]
    codes = np.concatenate(
        [np.zeros(4), *(np.full(n, ord(c)) for n, c in zip(lengths, text, strict=True)), np.zeros(6)]
    )
    frames = np.stack([codes, np.full(len(codes), mark)], 1).astype(np.float16)
    return Spoken(text, frames, np.cumsum(lengths) + 3)


BANK = Bank([spoken(text, mark) for mark, text in enumerate(TEXTS)])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="abcehinostyg ", min_size=1, max_size=40), st.integers(0, 99))
def test_a_sentence_in_pieces_says_each_character_where_it_ends(text: str, seed: int):
    said = BANK.say(text, np.random.default_rng(seed))
    assert said is not None and said.text == text and len(said.ends) == len(text)
    assert (np.diff(said.ends) > 0).all() and said.ends[-1] < len(said.frames)
    codes = said.frames[:, 0]
    assert "".join(chr(int(codes[end])) for end in said.ends) == text
    assert set(codes[said.ends[-1] + 1 :]) == {0}, "and then there is silence"


def test_pieces_are_long_where_the_same_was_said_and_short_elsewhere():
    rng = np.random.default_rng(0)
    for _ in range(20):
        said = BANK.say(TEXTS[1], rng)
        assert said is not None and len(set(said.frames[:, 1])) < 4
        said = BANK.say(TEXTS[3], rng)  # what stands next to a piece stands there too
        assert said is not None and set(said.frames[:, 1]) <= {0, 3}


def test_what_no_recording_says_cannot_be_said():
    assert BANK.say("a zebra", np.random.default_rng(0)) is None
    with pytest.raises(ValueError, match="ASCII"):
        Bank([Spoken("é", np.zeros((3, 2), np.float16), np.array([1]))])
    with pytest.raises(ValueError, match="no recording could be aligned"):
        Bank([])


def test_two_sentences_have_a_space_and_a_pause_between_them():
    both = after_one_another(spoken("a boy"), spoken("the sea"), 3)
    assert both.text == "a boy the sea" and len(both.ends) == len(both.text)
    codes = both.frames[:, 0]
    assert [chr(int(codes[end])) for end in both.ends if codes[end]] == list("a boythe sea")
    assert both.ends[5] == both.ends[4] + 1 and both.ends[6] - both.ends[4] == 3 + 4 + 2


def test_what_was_heard_is_made_once(tmp_path: Path):
    made: list[int] = []

    def make() -> list[Spoken]:
        made.append(1)
        return [spoken(text) for text in TEXTS]

    for _ in range(2):
        kept = kept_posteriorgrams(tmp_path / "run" / "heard.npz", make)
        for mine, theirs in zip(kept, make(), strict=True):
            assert mine.text == theirs.text
            np.testing.assert_array_equal(mine.frames, theirs.frames)
            np.testing.assert_array_equal(mine.ends, theirs.ends)
    assert len(made) == 3


def injection(**changes: object) -> Injection:
    config = InjectionConfig(
        posteriorgram=PosteriorgramConfig(lstm_size=24, dropout=0.0),
        decoder=DecoderConfig(embedding_size=8, lstm_size=24, delay_frames=3),
        chunk_width=4,
        dropouts=(0.0, 0.2),
        batch_texts=8,
    ).model_copy(update=changes)
    return Injection(config, BANK, SENTENCES, Tokenizer.from_texts([*TEXTS, "defgz"]), 640, seed=1)


def test_a_batch_is_the_same_whenever_it_is_asked_for_and_each_process_has_its_own():
    whole = injection(joined_probability=0.5, replaced_probability=0.5).epoch(0, 0, 0, 1)
    later = injection(joined_probability=0.5, replaced_probability=0.5).epoch(0, 2, 0, 1)
    assert len(whole) == len(later) + 2
    for name in ("frames", "tokens", "given", "selected"):
        assert torch.equal(getattr(whole[2], name), getattr(later[0], name))
    assert not torch.equal(whole[0].given, whole[0].tokens)
    first, second = (injection().epoch(0, 0, rank, 2) for rank in range(2))
    assert len(first) == len(second) > 0
    assert first[0].tokens.shape != second[0].tokens.shape or not torch.equal(first[0].tokens, second[0].tokens)
    assert not torch.equal(injection().epoch(1, 0, 0, 1)[0].tokens, whole[0].tokens)


def test_a_batch_selects_each_character_a_delay_after_its_end():
    plainly = injection(joined_probability=0.0, replaced_probability=0.0, slips=0.0)
    batch = plainly.epoch(0, 0, 0, 1)[0]
    assert len(batch.tokens) == 8 and torch.equal(batch.given, batch.tokens)
    assert batch.seconds == int(batch.num_frames[-2:].sum()) * 0.04, "two of eight are recordings"
    for row in range(8):
        count = int(batch.num_tokens[row]) - 1
        text = plainly.tokenizer.decode(batch.tokens[row, :count].tolist())
        frames, selected = batch.frames[row, :, 0], batch.selected[row]
        assert "".join(chr(int(frames[at - 3])) for at in selected[:count].tolist()) == text
        assert selected[count:].eq(-1).all() and batch.tokens[row, count] == Tokenizer.eos_id


def test_a_character_is_never_selected_where_the_audio_has_ended():
    batch = injection(decoder=DecoderConfig(delay_frames=8)).epoch(0, 0, 0, 1)[0]
    for selected, count, num_frames in zip(batch.selected, batch.num_tokens, batch.num_frames, strict=True):
        real = selected[: int(count) - 1]
        kept = real[real >= 0]
        assert (kept.diff() > 0).all() and kept.max() < num_frames


def test_a_path_that_slips_excuses_its_own_mistakes_and_no_others():
    """Definition, frame by frame: a decision is right where it selects if and only if a character is due."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        places, slips = np.cumsum(rng.integers(1, 4, 12)), rng.integers(-2, 3, 12)
        selected, excused = slipped(places, slips, int(places[-1]) + 1)
        real = selected[selected >= 0]
        assert (np.diff(real) > 0).all() and (selected[len(real) :] == -1).all()
        for frame in range(len(excused)):
            waiting = int((real < frame).sum())  # characters selected before
            due = waiting < len(places) and places[waiting] <= frame
            assert excused[frame] == ((frame in real) != due), (seed, frame)
    selected, excused = slipped(places, 0 * slips, int(places[-1]) + 1)
    assert (selected == places).all() and not excused.any()


def test_excused_decisions_are_not_learned():
    run, _ = SpeechModel(tiny(30)), torch.manual_seed(0)
    memory, tokens = torch.randn(1, 20, run.config.memory_size), torch.tensor([[4, 5, 6, 2]])
    frames, config = torch.tensor([[3, 7, 11, -1]]), injected()
    parts = (run.eval(), config, (memory, torch.tensor([20])), tokens, torch.tensor([4]), frames)
    energies = run.along_path(memory, torch.tensor([20]), tokens, torch.tensor([4]), frames).energies[0]
    excused = torch.zeros(1, 20, dtype=torch.bool)
    whole, _ = path_losses(*parts)["path"][1], excused.__setitem__((0, 7), True)
    less = path_losses(*parts, excused=excused)["path"][1]
    assert (whole - less).item() == pytest.approx(torch.nn.functional.softplus(-energies[7]).item() / 4, rel=1e-4)


def started_model(tokenizer: Tokenizer) -> Checkpoint:
    """A model with a head of phones, which has learned nothing."""
    torch.manual_seed(0)
    config = tiny(tokenizer.vocab_size).model_copy(update={"phones": ("a", "b")})
    return Checkpoint(SpeechModel(config), config, tokenizer, {})


def recordings() -> Corpus:
    samples = (8000 * np.random.default_rng(0).normal(0, 0.3, 200_000)).astype(np.int16)
    rows = tuple(Utterance(f"{n}", text, "s", "c", 50_000 * n, 50_000) for n, text in enumerate(TEXTS))
    return Corpus(rows, (samples,))


def test_hearing_worse_is_of_the_encoder_and_ends_with_the_hearing():
    tokenizer = Tokenizer.from_texts(TEXTS)
    start = started_model(tokenizer)
    model = SpeechModel(start.config.with_dropout(0.3))
    model.load_state_dict(start.model.state_dict())
    augmenter = Augmenter(plain().augment, recordings())
    clear, again, worse = (hear(model, tokenizer, augmenter, dropout, 3) for dropout in (0.0, 0.0, 0.5))
    assert [s.text for s in clear] == [s.text for s in worse] and not model.training
    for a, b, c in zip(clear, again, worse, strict=True):
        np.testing.assert_array_equal(a.frames, b.frames)
        np.testing.assert_array_equal(a.ends, c.ends)  # aligned by what is heard without
        assert a.frames.shape[1] == tokenizer.vocab_size + 3 and not np.array_equal(a.frames, c.frames)


def trainer(directory: Path) -> tuple[Trainer, dict[str, torch.Tensor]]:
    tokenizer = Tokenizer.from_texts([*TEXTS, "defgz"])
    start = started_model(tokenizer)
    like = injection().config
    config = injected().model_copy(update={"injection": like, "preset": "tiny", "bf16": False, "warmup_steps": 5})
    config = config.model_copy(update={"augment": plain().augment, "learning_rate": 1e-2, "steps": 300})
    augmenter = Augmenter(config.augment, recordings())
    directory.mkdir(exist_ok=True)
    save_checkpoint(directory / "start.safetensors", start.model, tokenizer, {})
    began = started(directory / "start.safetensors", config, None)
    made = make_injection(like, 19, began, augmenter, SENTENCES, directory / "heard.npz")
    run = Trainer(config, began.model, tokenizer, augmenter, None, directory, injection=made)
    return run, {name: t.clone() for name, t in start.model.state_dict().items()}


def test_a_decoder_learns_from_text_and_the_encoder_stays(tmp_path: Path):
    run, before = trainer(tmp_path)
    batch = next(iter(run._loader()))
    found = [run.train_step(batch) for _ in range(80)]
    assert found[-1]["ce"] < 0.6 * found[0]["ce"] and found[-1]["path"] < 0.6 * found[0]["path"]
    after = run.model.state_dict()
    for name, weight in before.items():
        if not name.startswith("decoder."):
            assert torch.equal(after[name], weight), name
    run.save()
    run.finish()
    kept = load_checkpoint(tmp_path / "final.safetensors")
    assert kept.config.posteriorgram and kept.config.decoder.delay_frames == 3 and kept.config.phones == ("a", "b")
    again, _ = trainer(tmp_path)
    assert again.resume() and again.step == 80

    further = started(tmp_path / "final.safetensors", run.config, None)
    assert further.config == kept.config, "which can be trained on"
    encoder = started(tmp_path / "final.safetensors", plain(), None)
    assert encoder.config.posteriorgram is None and encoder.config.decoder.delay_frames == 0
    assert not encoder.config.phones, "what another encoder would say is another language"
    for name, weight in encoder.model.encoder.state_dict().items():
        assert torch.equal(weight, kept.model.encoder.state_dict()[name])


def test_text_is_asked_for_where_it_is_learned_from(tmp_path: Path):
    status, output = said("train", "--recipe", "injected", "--data", tmp_path, "--out", tmp_path, "--init", "x")
    assert status == 1 and "--text is needed" in output
    text = tmp_path / "t.txt"
    status, output = said("train", "--recipe", "plain", "--data", tmp_path, "--out", tmp_path, "--text", text)
    assert status == 1 and "--text is needed" in output
    with pytest.raises(ValueError, match="decoder that alone is trained"):
        TrainConfig(injection=InjectionConfig())
    start, augmenter = started_model(Tokenizer.from_texts(TEXTS)), Augmenter(plain().augment, recordings())
    with pytest.raises(ValueError, match="less than a batch"):
        make_injection(injection().config, 0, start, augmenter, ["a cat"], tmp_path / "heard.npz")
