"""Samples in, characters out: features, encoder and search behind `init_state`, `step` and `flush`.

Owns no audio and no sockets; the caller keeps the state. Use one instance from one thread at a time.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mocha_model.beam import BeamConfig, BeamSearch
from mocha_model.checkpoint import BUNDLED, CheckpointError, load_checkpoint
from mocha_model.confidence import Calibration
from mocha_model.config import ModelConfig, SearchConfig
from mocha_model.emissions import Emission
from mocha_model.encoder import Encoder
from mocha_model.features import FeatureState
from mocha_model.joint import JointConfig, JointSearch, wording
from mocha_model.language import VocabularyError, WordLanguageModel
from mocha_model.model import SpeechModel
from mocha_model.phrases import PHRASE_BONUS, LivePhrases, PhraseBook
from mocha_model.pronounced import WordReader
from mocha_model.quantized import quantized
from mocha_model.revised import RevisedSearch
from mocha_model.scorers import Fusion
from mocha_model.search import GreedySearch, OfflineModelError, Symbol
from mocha_model.streaming import where_rows
from mocha_model.tokenizer import Tokenizer
from mocha_model.wide import WideSearch

BUNDLED_LANGUAGE = BUNDLED.with_name("language.safetensors")
LIVE_CAUTION = 0.6  # see `JointConfig`; of live text, which is not to wait longer than it has to
LIVE_THRESHOLD = 14.0  # of live text: what is further behind has no time to be right, and costs a seventh more
LEAST_EVIDENCE = -2.0  # of a file's segment: noise that is read as words has less, speech more
JOINT_PHRASE_BONUS = 1.5  # per character of a phrase: it is up against the language model


@dataclass(frozen=True)
class RecognizerState:
    """All a stream needs to go on; batch-first, constant size, gathered and scattered by `streaming`."""

    features: FeatureState
    encoder: tuple[Any, ...]
    search: Any  # SearchState, WideState or RevisedState


def language_for(tokenizer: Tokenizer, path: Path | None = None) -> WordLanguageModel | None:
    """A file of `train-lm`; if not given, the bundled one, or None where that is of another vocabulary.

    Raises LanguageModelError.
    """
    if path:
        return WordLanguageModel.load(path, tokenizer)
    try:
        return _bundled_language(tokenizer)
    except VocabularyError:
        return None


@lru_cache(maxsize=1)
def _bundled_language(tokenizer: Tokenizer) -> WordLanguageModel:
    """Read once for all that search with it."""
    return WordLanguageModel.load(BUNDLED_LANGUAGE, tokenizer)


def joint_search(
    config: ModelConfig, tokenizer: Tokenizer, width: int, language: WordLanguageModel | None = None
) -> tuple[JointConfig, Fusion] | None:
    """A joint search of `width` prefixes that a model of `config` wants, and the language model it is fused with.

    That is the bundled one if none is given. None where that is of another vocabulary than `tokenizer`: without a
    language model greedy search reads better.
    """
    if (language := language or language_for(tokenizer)) is None:
        return None
    joint = JointConfig(width, length_bonus=config.search.length_bonus, least_evidence=LEAST_EVIDENCE)
    return joint, joint_fusion(language, config)


def live_joint(config: JointConfig, patience: int) -> JointConfig:
    """`config` for live text: with `patience` (frames), no more caution than that takes, and fewer prefixes kept.

    What is certain is told at once, whether or not what follows will sound like speech.
    """
    told_at_once = replace(config, least_evidence=-math.inf)
    return replace(told_at_once, patience=patience, caution=LIVE_CAUTION, threshold=LIVE_THRESHOLD)


def joint_fusion(
    language: WordLanguageModel,
    config: ModelConfig,
    prior_weight: float | None = None,
    language_weight: float | None = None,
    phone_weight: float | None = None,
) -> Fusion:
    """What a joint search of a model of `config` is fused with.

    A language model; how its words sound, where the recogniser has a head of their phones; and less of what is
    frequent without it. Weights that are not given are those of `config`; a `phone_weight` of 0 is for no phones.

    The CTC branch has learned from its transcripts which characters are frequent, and the language model says it again.
    So its posteriors are divided by a power of these frequencies, as those of hybrid recognisers are by priors
    (Bourlard & Morgan 1994).
    """
    search = config.search
    prior = (search.prior_weight if prior_weight is None else prior_weight) * language.prior()
    heard = search.phone_weight if phone_weight is None else phone_weight
    lexicon = language.lexicon(config.phones) if config.phones and heard else None
    words = WordReader(lexicon, heard, search.phone_bonus * heard / search.phone_weight) if lexicon else None
    weight = search.language_weight
    if lexicon is None and config.phones and heard:  # more is left to it beside phones
        weight = min(weight, SearchConfig().language_weight)
    if language_weight is not None:
        weight = language_weight
    return Fusion(((weight, language),), prior, words)


class Recognizer:
    """A trained model as a batched, stateful streaming decoder."""

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        provenance: dict[str, Any] | None = None,
        beam: BeamConfig | JointConfig | None = None,
        fusion: Fusion | None = None,
        phrases: PhraseBook | None = None,
        calibration: Calibration | None = None,
        file_calibration: Calibration | None = None,
        settled: JointConfig | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """Greedy search, or the beam or joint search that `beam` describes, with the scorers of `fusion`.

        Or greedy search whose segments a joint search settles, as `settled` describes: see `settling`. With `phrases`,
        each stream may have phrases of its own (see `init_state`); `calibration` is of its confidence,
        `file_calibration` of what a joint search gives. `encoder` is that of another recogniser with this model, to be
        shared, if given.
        """
        self.model, self.tokenizer, self.provenance = model.eval(), tokenizer, provenance or {}
        self.config = model.config
        on_cpu = model.features.mean.device.type == "cpu"
        self._encoder = encoder or (quantized(model.encoder) if on_cpu else model.encoder)
        self.phrases, self.calibration, self.file_calibration = phrases, calibration, file_calibration
        self._fusion = fusion or Fusion(())
        patience = beam.patience if isinstance(beam, JointConfig) else 0
        ahead = self.config.encoder.look_ahead_frames if patience else 0
        self.patience_samples = (patience + ahead) * self.frame_samples  # after its frame, a character comes by then
        self.least_evidence = beam.least_evidence if isinstance(beam, JointConfig) else -math.inf
        self.settles = settled is not None  # the text of a segment when it ends
        own = self._fusion.parts
        all_scorers = replace(self._fusion, parts=own if phrases is None else (*own, (1.0, phrases)))
        parts = (model.decoder, model.config.decoder, tokenizer.space_id)
        self._search: GreedySearch | WideSearch | RevisedSearch
        if settled:
            share = PHRASE_BONUS / JOINT_PHRASE_BONUS
            live = Fusion(((share, LivePhrases(phrases)),)) if phrases is not None else None
            self._search = RevisedSearch(GreedySearch(*parts, live), JointSearch(*parts, settled, all_scorers))
        elif isinstance(beam, JointConfig):
            self._search = JointSearch(*parts, beam, all_scorers)
        elif beam:
            self._search = BeamSearch(*parts, beam, all_scorers)
        else:
            self._search = GreedySearch(*parts, all_scorers)

    @classmethod
    def load(cls, path: str | Path | None = None, device: str = "cpu") -> "Recognizer":
        """From a checkpoint file, or the bundled one: greedy; raises `CheckpointError`.

        Ready for phrases where it writes characters.
        """
        c = load_checkpoint(path, device)
        try:
            return cls(
                c.model,
                c.tokenizer,
                c.provenance,
                phrases=PhraseBook(c.tokenizer) if c.tokenizer.units == "characters" else None,
                calibration=c.calibration,
                file_calibration=c.file_calibration,
            )
        except OfflineModelError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def searching(
        self, width: int, language: WordLanguageModel | None = None, patience_s: float | None = None
    ) -> "Recognizer":
        """The same model behind a `joint_search`: slower, and reads far better.

        Characters are emitted when all prefixes agree on them, mostly at the end of a sentence, and 200 frames after
        their own at the latest; or, with `patience_s`, after so long, rounded down to whole frames, at the latest, and
        before where they are likely enough. The encoder's look-ahead is a part of that; one frame more is the least
        there is. Greedy where there is no language model.
        """
        if (found := joint_search(self.config, self.tokenizer, width, language)) is None:
            return self._greedy()
        config, fusion = found
        if patience_s is not None:
            frames = round(patience_s * self.sample_rate) // self.frame_samples
            config = live_joint(config, max(1, frames - self.config.encoder.look_ahead_frames))
        calibration = self.file_calibration or self.calibration
        phrases = self._joint_phrases(fusion)
        return self._alike(beam=config, fusion=fusion, phrases=phrases, calibration=calibration)

    def settling(self, width: int, language: WordLanguageModel | None = None) -> "Recognizer":
        """The same model, greedy, whose segments are settled by a `joint_search` when they end.

        What is emitted is the same; before the end of a segment come emissions that revise it. As slow as `searching`.
        Greedy where there is no language model.
        """
        if (found := joint_search(self.config, self.tokenizer, width, language)) is None:
            return self._greedy()
        config, fusion = found
        return self._alike(
            fusion=fusion,
            phrases=self._joint_phrases(fusion),
            calibration=self.calibration,
            file_calibration=self.file_calibration or self.calibration,
            settled=config,
        )

    def _greedy(self) -> "Recognizer":
        phrases = PhraseBook(self.tokenizer) if self.phrases is not None else None
        return self._alike(phrases=phrases, calibration=self.calibration, file_calibration=self.file_calibration)

    def _alike(self, **search: Any) -> "Recognizer":
        """The same network behind another search."""
        return Recognizer(self.model, self.tokenizer, self.provenance, encoder=self._encoder, **search)

    def _joint_phrases(self, fusion: Fusion) -> PhraseBook | None:
        if self.phrases is None:
            return None
        return PhraseBook(self.tokenizer, JOINT_PHRASE_BONUS, wording(fusion, self.tokenizer))

    @property
    def name(self) -> str:
        """What the checkpoint calls itself."""
        return str(self.provenance.get("name", "mocha-asr"))

    @property
    def sample_rate(self) -> int:
        """Hz of the samples that `step` takes."""
        return self.config.features.sample_rate

    @property
    def frame_samples(self) -> int:
        """Samples from one encoder frame to the next."""
        return self.config.frame_samples

    @property
    def latency_samples(self) -> int:
        """How far a frame's analysis window reaches beyond the frame's own start: after that its audio is complete."""
        return self.config.features.window_samples

    @property
    def look_ahead_samples(self) -> int:
        """How much more the encoder hears before it puts out a frame."""
        return self.config.encoder.look_ahead_frames * self.frame_samples

    @property
    def pause_frames(self) -> int:
        """Frames without a character that end a segment, unless a stream has a number of its own."""
        return self.config.decoder.endpoint_frames

    @property
    def chunk_width(self) -> int:
        """w, frames that each character attends to."""
        return self.model.decoder.attention.chunk_width

    def init_state(self, batch_size: int, roots: Tensor | None = None, pause: Tensor | None = None) -> RecognizerState:
        """State of `batch_size` streams that have heard nothing.

        `roots` [B] int64 are what `phrases.add` gave for each stream, 0 for none; they stay until another state.
        `pause` [B] int64 is how many frames without a character end a segment, `pause_frames` if not given.
        """
        device = self.model.features.mean.device
        scorers = self._fusion.init_state(batch_size, device)
        if self.phrases is not None:
            unnamed = torch.zeros(batch_size, dtype=torch.int64, device=device)
            scorers = (*scorers, self.phrases.at(unnamed if roots is None else roots))
        return RecognizerState(
            self.model.features.init_state(batch_size),
            self._encoder.init_state(batch_size),
            self._search.init_state(batch_size, scorers, pause),
        )

    @torch.inference_mode()
    def step(
        self, samples: Tensor, num_valid: Tensor, state: RecognizerState
    ) -> tuple[list[list[Emission]], RecognizerState]:
        """Hear more audio.

        Args:
            samples: [B, N] float32 in [-1, 1] at `sample_rate`, N >= 0; anything may stand in the padding.
            num_valid: [B] int64, real samples of each row.
            state: what `init_state`, `step` or `flush` returned.

        Returns:
            Emissions of each row in order, and the new state; rows with ``num_valid == 0`` come back bit-identical.

        """
        frames, num_frames, features = self.model.features.step(samples, num_valid, state.features)
        memory, below, num_memory, encoder = self._encoder.step_both(frames, num_frames, state.encoder)
        phones = {"phones": self.model.phone_log_probs(below)} if self._fusion.words else {}
        symbols, search = self._search.step(memory, self.model.ctc(memory), num_memory, state.search, **phones)
        return self._emissions(symbols, len(num_valid)), RecognizerState(features, encoder, search)

    @torch.inference_mode()
    def flush(self, state: RecognizerState, rows: Tensor) -> tuple[list[list[Emission]], RecognizerState]:
        """End the audio of `rows` [B] bool: the silent tail, the zero context, and a fresh state for those rows."""
        tail = torch.zeros(len(rows), self.config.tail_samples, device=rows.device)
        emissions, state = self.step(tail, rows.long() * tail.shape[1], state)
        symbols, search = self._search.flush(rows, state.search)
        for row, more in enumerate(self._emissions(symbols, len(rows))):
            emissions[row] += more
        features, encoder = self.model.features.init_state(len(rows)), self._encoder.init_state(len(rows))
        return emissions, RecognizerState(
            where_rows(rows, features, state.features), where_rows(rows, encoder, state.encoder), search
        )

    def transcribe(self, samples: Tensor) -> list[Emission]:
        """All emissions of one utterance [N]: one step, then flush."""
        device = samples.device
        found, state = self.step(samples[None], torch.tensor([len(samples)], device=device), self.init_state(1))
        rest, _ = self.flush(state, torch.tensor([True], device=device))
        return found[0] + rest[0]

    def _emissions(self, symbols: list[Symbol], batch_size: int) -> list[list[Emission]]:
        rows: list[list[Emission]] = [[] for _ in range(batch_size)]
        for s in symbols:
            ends = s.token == self.tokenizer.eos_id
            text = self.tokenizer.symbol(s.token)
            rows[s.row].append(Emission(text, s.frame, s.p, s.q, ends, s.weights, s.certain, s.revises))
        return rows
