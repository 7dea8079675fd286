"""Training along the CTC path: its likelihood, scheduled sampling, slips."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mocha_model.attention import Memory
from mocha_model.config import tiny
from mocha_model.decoder import Decoder
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import losses, path, policy
from mocha_training.augment import AugmentConfig, Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus
from mocha_training.path import drawn_slips, path_losses, sampled, slipped
from mocha_training.policy import Drawn, drawn
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer
from tests.training.made_up import make_trainer, path_parts


def test_path_likelihood_is_the_probability_of_the_draws():
    energies = torch.tensor([[-1.0, 0.5, 2.0, 9.0]])
    selects, decides = torch.tensor([[False, False, True, True]]), torch.tensor([[True, True, True, False]])
    p = energies[0].sigmoid()
    expected = -((1 - p[0]) * (1 - p[1]) * p[2]).log() / 2
    torch.testing.assert_close(losses.path_likelihood(energies, selects, decides, torch.tensor([2])), expected)


def test_path_training_needs_chunks_that_follow_a_pointer(corpus: Corpus, tmp_path: Path):
    for changes in ({"mechanism": "softmax"}, {"energy": "dot"}):
        model = SpeechModel(tiny(30).with_attention(**changes))
        config = plain().model_copy(update={"attention": "path"})
        with pytest.raises(ValueError, match="path"):
            Trainer(config, model, Tokenizer.from_texts(["ab"]), Augmenter(config.augment, corpus), None, tmp_path)


def test_path_training_teaches_the_attention_to_fire(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=100, learning_rate=1e-2, attention="path")
    batch = next(iter(trainer._loader()))
    history = [trainer.train_step(batch) for _ in range(90)]
    assert history[0]["fired"] == 0 and history[-1]["fired"] > 0.2
    assert history[-1]["path"] < 0.5 * history[0]["path"] and history[-1]["ce"] < history[0]["ce"]


def test_scheduled_sampling_draws_from_the_distributions_of_the_decoder(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path")
    model, batch = trainer.model, next(iter(trainer._loader()))
    with torch.no_grad():
        model.decoder.output.weight *= 10  # so that distributions differ from place to place
        model.decoder.output.bias[trainer.tokenizer.eos_id] = 3.0
    memory, num_memory, _, ends = path_parts(trainer, batch)
    rows = (model, (memory, num_memory), batch.tokens, batch.num_tokens, ends)
    inputs = torch.stack([sampled(*rows, 0.4) for _ in range(400)])
    logits = model.along_path(memory, num_memory, batch.tokens, batch.num_tokens, ends).logits
    logits[..., [0, 1, 2, 3]] = -torch.inf  # blank, start, end and unknown have never been read
    drawn = 0.4 * logits.softmax(2)
    expected = drawn + 0.6 * torch.nn.functional.one_hot(batch.tokens, model.config.vocab_size)
    found = torch.stack([(inputs == symbol).float().mean(0) for symbol in range(model.config.vocab_size)], dim=2)
    assert (drawn[:, 1:] - drawn[:, :-1]).abs().max() > 0.25  # a shift by one place would be seen
    torch.testing.assert_close(found, expected, atol=0.12, rtol=0)


def test_scheduled_sampling_changes_inputs_and_not_targets(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path", sampling_probability=1.0)
    model, batch = trainer.model, next(iter(trainer._loader()))
    with torch.no_grad():
        model.decoder.output.bias[4] = 30.0  # it would always draw this one
        model.decoder.embedding.weight *= 10
    memory, num_memory, _, ends = path_parts(trainer, batch)
    rows = ((memory, num_memory), batch.tokens, batch.num_tokens, ends)

    def cross_entropy(inputs: torch.Tensor) -> float:
        logits = model.along_path(memory, num_memory, inputs, batch.num_tokens, ends).logits
        return losses.label_smoothed_cross_entropy(logits, batch.tokens, batch.num_tokens, 0.1).item()

    with torch.no_grad():
        found = path_losses(model, trainer.config, *rows)["ce"][1].item()
        drawn, transcript = cross_entropy(torch.full_like(batch.tokens, 4)), cross_entropy(batch.tokens)
    assert found == pytest.approx(drawn, abs=1e-5) and abs(drawn - transcript) > 1e-3


def slipped_by_hand(ends: list[int], late: list[int], length: int) -> tuple[list[int], set[int]]:
    """Where each is selected, and the decisions that are mistakes, one after the other."""
    selected, excused, last = [-1] * len(ends), set(), -1
    for n, (end, slip) in enumerate(zip(ends, late, strict=True)):
        at = max(end + slip, 0, last + 1)
        excused |= {at} if at < end else set(range(max(end, last + 1), min(at, length)))
        if at < length:
            selected[n] = last = at
        else:
            break
    return selected, excused


def test_slips_move_selections_and_excuse_mistakes():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        length = int(torch.randint(8, 14, (), generator=generator))
        count = int(torch.randint(1, 8, (), generator=generator))
        places = torch.randperm(length, generator=generator)[:count].sort().values
        ends = torch.nn.functional.pad(places, (0, 9 - count), value=-1)[None]
        late = torch.randint(-1, 3, (1, 9), generator=generator)
        frames, excused = slipped(ends, late, torch.tensor([length]), 15)
        by_hand = slipped_by_hand(places.tolist(), late[0, :count].tolist(), length)
        found = set(excused[0, :length].nonzero()[:, 0].tolist())
        assert (frames[0, :count].tolist(), found) == by_hand and (frames[0, count:] == -1).all()
        seen |= {int(d) for d in (frames - ends)[frames >= 0]}
    assert seen == {-1, 0, 1, 2}
    never = torch.full((1, 4), -1)
    assert (slipped(never, torch.ones_like(never), torch.tensor([6]), 6)[0] == -1).all()


def test_slips_are_drawn_as_often_as_asked():
    late = drawn_slips(torch.zeros(300, 300, dtype=torch.int64), 0.18)
    shares = {slip: (late == slip).float().mean().item() for slip in (-1, 0, 1, 2)}
    assert shares == pytest.approx({-1: 0.04, 0: 0.82, 1: 0.1, 2: 0.04}, abs=0.01)


def test_mistakes_of_a_slipped_path_are_not_learned(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(corpus, tmp_path, attention="path", slip_probability=1.0)
    model, batch = trainer.model, next(iter(trainer._loader()))
    memory, num_memory, _, _ = path_parts(trainer, batch)
    ends = torch.full_like(batch.tokens, -1)
    ends[:, 0] = 3
    monkeypatch.setattr(path, "drawn_slips", lambda ends, probability: torch.full_like(ends, 2))
    out = model.along_path(memory, num_memory, batch.tokens, batch.num_tokens, torch.where(ends == 3, 5, ends))
    assert out.selects[:, 5].all() and not out.selects[:, 3:5].any()
    decides = out.decides.clone()
    decides[:, 3:5] = False  # to have waited there is the mistake; to select at 5 is right
    expected = losses.path_likelihood(out.energies, out.selects, decides, batch.num_tokens)
    found = path_losses(model, trainer.config, (memory, num_memory), batch.tokens, batch.num_tokens, ends)
    torch.testing.assert_close(found["path"][1], expected)
    with_mistakes = losses.path_likelihood(out.energies, out.selects, out.decides, batch.num_tokens)
    assert abs(with_mistakes - expected) > 1e-3


def test_texts_that_the_decoder_writes_are_of_one_view(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {"attention": "path", "policy_weight": 1.0, "policy_draws": 3, "augment": AugmentConfig.nothing()}
    for weight, views in ((0.0, 1), (0.2, 2)):
        trainer = make_trainer(corpus, tmp_path / str(views), **changes, consistency_weight=weight)
        batch, written = next(iter(trainer._loader())), []

        def counted(decoder: Decoder, memory: Memory, temperature: float, written: list[int] = written) -> Drawn:
            written.append(len(memory.values))
            return drawn(decoder, memory, temperature)

        monkeypatch.setattr(policy, "drawn", counted)
        figures = trainer.train_step(batch)
        assert written == [3 * len(batch.samples)] and figures["drawn_wer"] > 0 and np.isfinite(figures["policy"])
    assert "policy" not in make_trainer(corpus, tmp_path / "without", attention="path").train_step(batch)


@pytest.mark.parametrize("option", ["sampling_probability", "slip_probability"])
def test_sampling_and_slips_are_of_the_path(option: str):
    with pytest.raises(ValueError, match=f"{option} is of training along the path"):
        TrainConfig.model_validate({"attention": "expected", option: 0.4})
