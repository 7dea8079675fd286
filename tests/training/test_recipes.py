"""The papers' recipes: every ingredient against its definition; whole paths on made-up corpora in the real layouts."""

import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from lhotse.recipes.timit import get_phonemes

from mocha_model import config as presets
from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import tiny
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import losses, recipes
from mocha_training.augment import Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, load_corpus, make_batches, trainable
from mocha_training.evaluate import Result, summarize
from mocha_training.manifests import Utterance
from mocha_training.phones import CLASS_OF, PhoneError, fold_phones
from mocha_training.trainer import Trainer
from mocha_training.weights import Draw, InitConfig, WeightNoise, draw_weights, noisy_parameters, perturbed
from tests.training.made_up import run, said, tones, write_sphere

PHONES = sorted(CLASS_OF)


@pytest.fixture(scope="module")
def timit_disc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few made-up speakers in TIMIT's layout; FAKS0 is one of the dev speakers and FELC0 of the core test set."""
    disc, rng = tmp_path_factory.mktemp("timit"), np.random.default_rng(0)
    for place in ("TRAIN/DR1/FCJF0", "TRAIN/DR2/MAEB0", "TEST/DR1/FAKS0", "TEST/DR1/FELC0"):
        directory = disc / "data" / place
        directory.mkdir(parents=True)
        for sentence in ("SA1", "SI1027", "SX37", "SX127"):
            phones = ["h#", *rng.choice(PHONES, 6), "q", "ax-h", "h#"]
            write_sphere(directory / f"{sentence}.WAV", tones(phones, 1600))
            ends = [f"{1600 * i} {1600 * (i + 1)} {p}" for i, p in enumerate(phones)]
            (directory / f"{sentence}.PHN").write_text("\n".join(ends) + "\n")
            (directory / f"{sentence}.WRD").write_text("1600 9600 words\n")
            (directory / f"{sentence}.TXT").write_text("0 14400 Some words.\n")
    return disc


@pytest.fixture(scope="module")
def kaldi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up sentences as Kaldi's scripts leave WSJ: whole recordings, one of the directories with segments."""
    root = tmp_path_factory.mktemp("wsj")
    sentences = ["A. T. AND T.", "STOCKS <NOISE> FELL", "BONDS ROSE", "<SPOKEN_NOISE> THEY'RE UP", "NO COMMENT"]
    for split in ("train_si284", "test_dev93", "test_eval92"):
        directory = root / split
        directory.mkdir()
        tables: dict[str, list[str]] = {name: [] for name in ("wav.scp", "text", "utt2spk", "reco2dur")}
        for number, sentence in enumerate(sentences):
            key, samples = f"4k{number}c020{number}", tones(list(sentence), 1200)
            with wave.open(str(directory / f"{key}.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(samples.tobytes())
            rows = (directory / f"{key}.wav", sentence, f"4k{number}", len(samples) / 16_000)
            for name, value in zip(tables, rows, strict=True):
                tables[name].append(f"{key} {value}")
        if split == "test_eval92":
            tables["segments"] = ["4k0c0200 4k0c0200 0.0 0.8"]
            tables["text"], tables["utt2spk"] = ["4k0c0200 A. T. AND"], ["4k0c0200 4k0"]
        for name, lines in tables.items():
            (directory / name).write_text("\n".join(lines) + "\n")
    return root


def test_timit_from_its_own_layout_to_a_phone_error_rate(
    timit_disc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    data, out = tmp_path / "data", tmp_path / "run"
    assert "train 6, dev 3, test 3" in run("prepare", "timit", timit_disc, "--out", data)
    corpus = load_corpus(data / "train.jsonl.gz", units="words")
    (spoken,) = (u for u in corpus.utterances if u.key == "FCJF0-SI1027")
    lines = (timit_disc / "data/TRAIN/DR1/FCJF0/SI1027.PHN").read_text().splitlines()
    assert spoken.text.split() == [line.split()[2] for line in lines] and spoken.speaker == "FCJF0"
    assert np.array_equal(corpus.audio(0)[:1600], tones(["h#"], 1600) / np.float32(32768))

    run("train", "--recipe", "timit", "--data", data, "--out", out, "--steps", 3, "--device", "cpu")
    checkpoint = load_checkpoint(out / "final.safetensors")
    assert checkpoint.config.encoder == presets.timit(9).encoder and checkpoint.tokenizer.units == "words"
    found = {unit for u in corpus.utterances for unit in u.text.split()}
    assert set(checkpoint.tokenizer.symbols[4:]) == found
    normalised, _ = checkpoint.model.features(torch.from_numpy(corpus.audio(1))[None], torch.tensor([16_000]))
    assert normalised.shape[2] == 123 and normalised[0, :90].mean().abs() < 0.5

    hypotheses = tmp_path / "hypotheses.jsonl"
    options = ("--model", out / "final.safetensors", "--manifest", data / "test.jsonl.gz", "--fold-phones")
    beam = ("--beam", 10, "--threshold", "inf")
    report = json.loads(run("evaluate", *options, *beam, "--json", "--hypotheses", hypotheses))
    assert report["decoding"] == "beam" and report["utterances"] == 3 and report["wer"] > 0
    rows = [json.loads(line) for line in hypotheses.read_text().splitlines()]
    assert all(set(row["hypothesis"].split()) <= found for row in rows)
    results = [Result("", "", row["reference"], row["hypothesis"], row["ctc"], ()) for row in rows]
    assert summarize(results, fold_phones)["wer"] == report["wer"]


@pytest.mark.parametrize(
    ("recipe", "options", "mechanism"),
    [
        ("wsj_mocha", (), "mocha"),
        ("wsj_monotonic", (), "monotonic"),
        ("wsj_mocha", ("--mechanism", "softmax"), "softmax"),
        ("wsj_mocha", ("--ctc-only",), "mocha"),
    ],
)
def test_wsj_from_kaldi_directories_to_a_word_error_rate(
    recipe: str,
    options: tuple[str, ...],
    mechanism: str,
    kaldi: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With a tiny network in place of the paper's; everything else is the recipe."""
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    own = getattr(presets, recipe)(9).attention.mechanism
    monkeypatch.setattr(presets, recipe, lambda size: tiny(size).with_attention(mechanism=own))
    data, out = tmp_path / "data", tmp_path / "run"
    run("prepare", "wsj", kaldi, "--out", data)
    texts = [u.text for u in load_corpus(data / "train.jsonl.gz").utterances]
    assert texts == ["a t and t", "stocks fell", "bonds rose", "they're up", "no comment"]
    (segment,) = load_corpus(data / "test.jsonl.gz").utterances
    assert (segment.text, segment.num_samples) == ("a t and", 12_800)

    run("train", "--recipe", recipe, "--data", data, "--out", out, "--steps", 2, "--device", "cpu", *options)
    checkpoint = load_checkpoint(out / "final.safetensors")
    assert checkpoint.config.attention.mechanism == mechanism
    assert checkpoint.provenance["recipe"]["ctc_only"] == (1.0 if options == ("--ctc-only",) else 0.0)
    on_dev = ("evaluate", "--model", out / "final.safetensors", "--manifest", data / "dev.jsonl.gz", "--json")
    if mechanism == "softmax":
        refused, output = said(*on_dev, "--beam", 8)
        assert refused == 1 and "offline" in output
    report = json.loads(run(*on_dev, *(() if mechanism == "softmax" else ("--beam", 8))))
    assert report["utterances"] == 5 and report["wer"] > 0 and report["ctc_wer"] > 0


def test_phones_fold_to_the_standard_classes():
    published = {phone: name for phone, name in get_phonemes(39).items() if phone != "sil"}
    assert published == CLASS_OF and len(CLASS_OF) == 61 and len(set(CLASS_OF.values()) - {""}) == 39
    assert fold_phones("h# ix q zh hv ax-h tcl t") == "sil ih sh hh ah sil t"
    with pytest.raises(PhoneError, match="'oops'"):
        fold_phones("h# oops")
    assert summarize([Result("k", "c", "h# ix q", "pau ih", "aa ih", ())], fold_phones)["wer"] == 0
    assert summarize([Result("k", "c", "h# ix q", "pau ih", "aa ih", ())], fold_phones)["ctc_wer"] == 0.5
    assert summarize([Result("k", "c", "q", "", "", ())], fold_phones)["wer"] is None


# What each paper says, written out again beside the recipes.
ADAM = {"betas": (0.9, 0.999), "epsilon": 1e-6, "weight_decay": 1e-6, "decoupled_decay": False, "scalar_rate": 1.0}
ADAM |= {"noise_std": 1.0, "noise_full_at": 0.0, "quantity_weight": 0.0, "latency_weight": 0.0, "ctc_weight": 0.0}
WSJ = {
    "batch_utterances": 8,
    "clip": 1.0,
    "weight_noise": WeightNoise(std=0.075, from_step=20_000, where="lstm"),
    "neighbour_smoothing": (0.015, 0.035, 1.0, 0.035, 0.015),
}
TIMIT = {"batch_utterances": 4, "clip": 2.0, "weight_noise": WeightNoise(std=0.5, from_step=2_000)}


@pytest.mark.parametrize(
    ("recipe", "expected", "rates"),
    [
        ("timit", TIMIT, {0: 1e-4, 39_999: 1e-4, 40_000: 5e-5, 99_999: 5e-5}),
        (
            "wsj_monotonic",
            WSJ,
            {0: 2e-4, 699_999: 2e-4, 700_000: 2e-5, 999_999: 2e-5, 1_000_000: 2e-6, 1_300_000: 2e-7},
        ),
        ("wsj_mocha", WSJ, {0: 1e-3, 599_999: 1e-3, 600_000: 1e-4, 800_000: 1e-5, 999_999: 1e-5, 1_000_000: 1e-6}),
    ],
)
def test_recipes_have_the_papers_figures(
    recipe: str, expected: dict[str, object], rates: dict[int, float], tmp_path: Path
):
    config = recipes.RECIPES[recipe]()
    for name, value in (ADAM | expected).items():
        assert getattr(config, name) == value, name
    trainer = make_trainer(tmp_path, config)
    for step, rate in rates.items():
        trainer.step = step
        assert trainer.learning_rate() == pytest.approx(rate)
    noise = config.weight_noise
    assert noise is not None
    for trainer.step, std in ((noise.from_step - 1, 0.0), (noise.from_step, noise.std)):
        assert trainer.weight_noise_std() == std
    group = trainer.optimizers[0].param_groups[0]
    assert not group["decoupled_weight_decay"] and (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-6)


OF_EXPECTATION = ("noise_std", "noise_full_at", "quantity_weight", "latency_weight")


def test_recipes_along_the_path_set_nothing_that_is_of_the_expectation_alone(tmp_path: Path):
    configs = {name: recipe() for name, recipe in recipes.RECIPES.items()}
    for name, config in configs.items():
        assert config.attention == "expected" or not config.model_fields_set & {*OF_EXPECTATION}, name
    others = {"noise_std": 9.0, "noise_full_at": 0.0, "quantity_weight": 9.0, "latency_weight": 9.0}
    for attention, alike in (("path", True), ("expected", False)):
        found = []
        for changes in ({}, others):
            trainer = make_trainer(tmp_path, plain(attention=attention, **changes))
            found.append(trainer.train_step(next(iter(trainer._loader())))["loss"])
        assert (found[0] == found[1]) == alike, attention


def test_recipes_of_others_take_no_field_that_there_is_not_and_no_value_that_it_cannot_have():
    config = recipes.path()
    changed = config.having(seed=7, augment=config.augment.having(pause_probability=1))
    assert changed.model_dump() == config.model_dump() | {
        "seed": 7,
        "augment": config.augment.model_dump() | {"pause_probability": 1.0},
    }
    assert changed.model_fields_set == config.model_fields_set | {"seed"}  # what a recipe says, not all it has
    for settings in (config, config.augment):
        with pytest.raises(ValueError, match=r"learning_rat\n.*not permitted"):
            settings.having(learning_rat=1e-3)
    with pytest.raises(ValueError, match="ctc_weight"):
        config.having(ctc_weight=2)
    with pytest.raises(ValueError, match="odd"):
        config.having(neighbour_smoothing=(0.1, 1.0))
    with pytest.raises(ValueError, match="highest"):
        config.augment.having(gain_db=(8, -8))


def two_recordings() -> Corpus:
    samples = np.concatenate([tones(list("abc"), 4000), tones(list("cb"), 4000)])
    parts = (Utterance("1", "abc", "s", "c", 0, 12_000), Utterance("2", "cb", "s", "c", 12_000, 8_000))
    return Corpus(parts, (samples,))


def make_trainer(directory: Path, config: TrainConfig) -> Trainer:
    corpus, tokenizer = two_recordings(), Tokenizer.from_texts(["abc"])
    torch.manual_seed(0)
    model = SpeechModel(tiny(tokenizer.vocab_size))
    return Trainer(config, model, tokenizer, Augmenter(config.augment, corpus), corpus, directory)


def plain(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(recipes.plain().model_dump() | {"warmup_steps": 1} | changes)


def test_weight_noise_is_felt_in_training_only_and_leaves_no_trace(tmp_path: Path):
    noisy = make_trainer(tmp_path / "a", plain(weight_noise={"std": 0.5, "from_step": 1}, learning_rate=1e-30))
    quiet = make_trainer(tmp_path / "b", plain(learning_rate=1e-30))
    batch = next(iter(noisy._loader()))
    before = {name: p.detach().clone() for name, p in noisy.model.named_parameters()}
    first, second = ([t.train_step(batch)["loss"] for _ in range(2)] for t in (noisy, quiet))
    assert first[0] == second[0] and abs(first[1] - second[1]) > 0.01
    for name, parameter in noisy.model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=1e-20, msg=name)
    gradients = [
        (a.grad - b.grad).abs().max()
        for a, b in zip(noisy.model.encoder.parameters(), quiet.model.encoder.parameters(), strict=True)
    ]
    assert max(gradients) > 1e-4


def test_noise_goes_where_the_papers_put_it():
    torch.manual_seed(0)
    model = SpeechModel(tiny(9))
    names = {id(p): name for name, p in model.named_parameters()}
    lstm = {names[id(p)] for p in noisy_parameters(model, "lstm")}
    recurrent = ("conv.weight", "conv.bias", "_l0", "cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh")
    assert all(n.endswith(recurrent) or n == "decoder.embedding.weight" for n in lstm)
    assert {"encoder.stack.1.lstm.bias_hh_l0", "encoder.grid.2.input_conv.weight", "decoder.cell.weight_hh"} <= lstm
    assert not any("norm" in n or "projection" in n or "grid.0" in n for n in lstm)
    matrices = {names[id(p)] for p in noisy_parameters(model, "matrices")}
    assert {"encoder.stack.0.projection.weight", "decoder.output.weight", "ctc.weight"} <= matrices
    assert not any("bias" in n or "norm" in n or "direction" in n or "gain" in n for n in matrices)
    weight = torch.full((400, 500), 0.1)
    with perturbed([weight], 0.075):
        assert (weight - 0.1).std().item() == pytest.approx(0.075, rel=0.01)
        assert weight.mean().item() == pytest.approx(0.1, abs=1e-3)
    assert torch.equal(weight, torch.full((400, 500), 0.1))


def test_first_weights_are_drawn_as_told():
    torch.manual_seed(0)
    model = SpeechModel(presets.wsj_mocha(49))
    biases = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 1}
    draw_weights(model, recipes.wsj_mocha().init)
    filters, recurrent = model.encoder.grid[1].conv.weight, model.encoder.stack[0].lstm.weight_hh_l0
    for weight in (filters, recurrent):
        assert 0.17 < weight.abs().max() <= 0.2  # cut off at two deviations, which leaves 0.88 of one
        assert weight.std().item() == pytest.approx(0.088, rel=0.03)
    for weight, scale in ((model.decoder.cell.weight_ih, 0.1), (model.decoder.embedding.weight, 1.0)):
        assert 0.99 * scale < weight.abs().max() <= scale
        assert weight.std().item() == pytest.approx(scale / math.sqrt(3), rel=0.03)
    for name, parameter in model.named_parameters():
        assert parameter.dim() > 1 or torch.equal(parameter, biases[name]), name
    phones = SpeechModel(presets.timit(65))
    draw_weights(phones, recipes.timit().init)
    for weight in (phones.encoder.stack[0].lstm.weight_ih_l0, phones.decoder.output.weight):
        assert 0.99 * 0.075 < weight.abs().max() <= 0.075
    assert 0.99 < phones.decoder.embedding.weight.abs().max() * math.sqrt(10) <= 1.0001
    untouched = SpeechModel(tiny(9))
    before = untouched.encoder.stack[0].lstm.weight_hh_l0.detach().clone()
    draw_weights(untouched, InitConfig(embedding=Draw(distribution="uniform", scale=5.0)))
    assert untouched.decoder.embedding.weight.abs().max() > 3
    assert torch.equal(before, untouched.encoder.stack[0].lstm.weight_hh_l0)


def test_l2_is_part_of_the_gradient(tmp_path: Path):
    """Adam's first step is ``lr * sign(gradient)``: with L2 a weight without another gradient shrinks by the rate."""
    trainer = make_trainer(tmp_path, plain(weight_decay=1e-2, decoupled_decay=False, learning_rate=1e-3))
    weight = trainer.model.decoder.embedding.weight
    before = weight.detach().clone()
    trainer.train_step(next(iter(trainer._loader())))
    unseen = trainer.tokenizer.encode("'")[0]
    torch.testing.assert_close(weight[unseen], before[unseen] - 1e-3 * before[unseen].sign(), rtol=0, atol=1e-6)


def test_label_smoothing_is_the_papers_formula():
    """Raffel 2017, D.1.2, target by target; what falls outside the transcript goes to the token itself."""
    torch.manual_seed(0)
    logits, tokens, num_tokens = torch.randn(2, 6, 9), torch.randint(3, 9, (2, 6)), torch.tensor([6, 4])
    shares = {-2: 0.015, -1: 0.035, 0: 1.0, 1: 0.035, 2: 0.015}
    total = 0.0
    for row, count in enumerate(num_tokens.tolist()):
        for at in range(count):
            target = torch.zeros(9)
            for offset, share in shares.items():
                place = at + offset if 0 <= at + offset < count else at
                target[tokens[row, place]] += share / 1.1
            assert target.sum().item() == pytest.approx(1)
            total -= float(target @ logits[row, at].log_softmax(0))
    weights = recipes.wsj_mocha().neighbour_smoothing
    smoothed = losses.localized_label_smoothing(logits, tokens, num_tokens, weights)
    assert smoothed.item() == pytest.approx(total / 10, rel=1e-5)
    with pytest.raises(ValueError, match="odd"):
        plain(neighbour_smoothing=(0.1, 1.0), label_smoothing=0)
    with pytest.raises(ValueError, match="label_smoothing"):
        plain(neighbour_smoothing=(0.1, 1.0, 0.1), label_smoothing=0.1)


def test_a_ctc_head_that_listens_changes_nothing_else(tmp_path: Path):
    listening = make_trainer(tmp_path / "a", plain(ctc_weight=0, quantity_weight=0, latency_weight=0, clip=0.1))
    batch = next(iter(listening._loader()))
    figures = listening.train_step(batch)
    assert set(figures) >= {"ctc", "ce"} and "quantity" not in figures
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in listening.model.ctc.parameters())
    rest = [p.grad for name, p in listening.model.named_parameters() if not name.startswith("ctc.")]
    assert sum(g.square().sum() for g in rest if g is not None).sqrt().item() == pytest.approx(0.1, rel=1e-3)
    alone = make_trainer(tmp_path / "b", plain(ctc_weight=0, quantity_weight=0, latency_weight=0, clip=0.1))
    torch.manual_seed(alone.config.seed * 1_000_003)
    _, ce = alone.losses(batch)["ce"]
    ce.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)
    assert norm.item() == pytest.approx(figures["norm"], rel=1e-4)
    for (name, a), b in zip(listening.model.named_parameters(), alone.model.parameters(), strict=True):
        if not name.startswith("ctc."):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_a_ctc_model_trains_nothing_of_the_decoder(tmp_path: Path):
    trainer = make_trainer(tmp_path, plain(ctc_only=1.0))
    before = [p.detach().clone() for p in trainer.model.decoder.parameters()]
    trainer.step = trainer.config.steps - 1
    figures = trainer.train_step(next(iter(trainer._loader())))
    assert "ce" not in figures
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.decoder.parameters(), strict=True))


def test_best_checkpoint_on_dev_is_the_final_one(tmp_path: Path):
    trainer = make_trainer(tmp_path, plain(final="best"))
    bias = trainer.model.ctc.bias
    for value, errors in ((1.0, 0.8), (2.0, 0.3), (3.0, 0.5)):
        with torch.no_grad():
            bias.fill_(value)
        trainer._keep_best(errors)
    trainer.save()
    resumed = make_trainer(tmp_path, plain(final="best"))
    assert resumed.resume() and resumed.fewest_errors == 0.3
    resumed.finish()
    final = load_checkpoint(tmp_path / "final.safetensors")
    assert final.model.ctc.bias[0] == 2.0 and final.provenance["dev_errors"] == 0.3


def test_evaluations_during_training_score_folded_phones(tmp_path: Path):
    tokenizer = Tokenizer.from_texts(["h# aa q"], "words")
    silent = Corpus((Utterance("1", "q", "s", "c", 0, 12_000),), (tones(["q"], 12_000),))
    rates = []
    for fold in (False, True):
        config = plain(units="words", fold_phones=fold)
        model = SpeechModel(tiny(tokenizer.vocab_size))
        trainer = Trainer(config, model, tokenizer, Augmenter(config.augment, silent), silent, tmp_path)
        rates.append(trainer.evaluate(silent).get("dev_wer"))
    assert rates[0] is not None and rates[1] is None  # the glottal stop is not scored, so nothing is left to score


def test_batches_can_be_counted_in_utterances():
    seconds = [1 + n % 3 for n in range(30)]
    batches = make_batches(seconds, 2.0, np.random.default_rng(0), num_examples=4)
    assert sorted(i for batch in batches for i in batch) == list(range(30))
    assert sorted(map(len, batches)) == [2, 4, 4, 4, 4, 4, 4, 4]


def test_rates_and_digits_are_those_of_the_units():
    phones = " ".join(["ax-h", "aa1"] * 10)
    corpus = Corpus((Utterance("1", phones, "s", "c", 0, 16_000),), (np.zeros(16_000, "i2"),))
    assert len(trainable(corpus, 0.1, 9, "words").utterances) == 1
    assert len(trainable(corpus, 0.1, 9).utterances) == 0
