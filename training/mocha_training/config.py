"""Everything a training run is told, in one typed object that travels in its checkpoints. No tensors, no paths."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mocha_model.tokenizer import Units
from mocha_training.augment import AugmentConfig
from mocha_training.settings import Settings
from mocha_training.weights import InitConfig, WeightNoise

Preset = Literal["small", "medium", "wide", "large", "wsj_mocha", "wsj_monotonic", "timit", "tiny"]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Mass = Annotated[float, Field(ge=0)]


class TrainConfig(Settings):
    """Optimisation, losses and schedule. "Progress" below runs from 0 to 1 over the run."""

    preset: Preset = Field("small", description="the network, a function of `mocha_model.config`")
    init: InitConfig = InitConfig()
    dropout: float | None = Field(
        None, ge=0, lt=1, description="after each LSTM layer of the encoder; None for the network's"
    )
    look_ahead: int | None = Field(
        None,
        ge=0,
        description="frames after each LSTM layer but the last that what follows hears; None for the network's",
    )
    hop_samples: int | None = Field(
        None, gt=0, description="between frames of features, which no weight depends on; None for the network's"
    )
    units: Units = Field("characters", description="what the network reads out: characters, or words such as phones")
    fold_phones: bool = Field(False, description="score TIMIT's phones as 39 classes in evaluations during training")

    seed: int = Field(0, ge=0, lt=2**32)
    steps: int = Field(20_000, gt=0, description="length of the run, unless the time budget ends it first")
    epochs: float = Field(0.0, ge=0, description="length in passes over the corpus, instead of `steps`; 0 for those")
    max_minutes: float = Field(0.0, ge=0, description="time budget that the schedules are stretched over; 0 for none")
    batch_seconds: float = Field(160.0, gt=0, description="audio per batch, padding included")
    batch_utterances: int = Field(0, ge=0, description="utterances per batch, instead of `batch_seconds`; 0 for those")
    bf16: bool = True

    learning_rate: float = Field(1e-3, gt=0)
    rate_drops: tuple[tuple[int, Positive], ...] = Field(
        (), description="(step, factor): after so many steps the rate is multiplied; if none, it falls along a cosine"
    )
    warmup_steps: int = Field(200, ge=1)
    scalar_rate: float = Field(20.0, gt=0, description="times the learning rate for g and r of the attention energies")
    betas: tuple[Momentum, Momentum] = (0.9, 0.98)
    epsilon: float = Field(1e-8, gt=0)
    muon: bool = Field(False, description="Muon for weight matrices (Jordan et al. 2024), Adam for the rest")
    weight_decay: float = Field(1e-2, ge=0, description="of weight matrices")
    decoupled_decay: bool = Field(True, description="AdamW; else L2: the decay is part of the gradient that Adam sees")
    weight_noise: WeightNoise | None = None
    clip: float = Field(5.0, gt=0, description="largest norm of the whole gradient")

    train_encoder: bool = Field(
        True,
        description="else the encoder stays as it is, and so does the CTC head unless nothing else is trained "
        "(`ctc_only` 1)",
    )
    ctc_only: float = Field(
        0.35, ge=0, le=1, description="progress until which only the CTC branch is trained; 1 for a CTC model"
    )
    ctc_weight: float = Field(
        0.4, ge=0, le=1, description="beside 1 - this for the decoder, after that; with 0 the CTC head only listens"
    )
    attention: Literal["expected", "path"] = Field(
        "expected", description="over all alignments (the papers), or along the CTC branch's own forced alignment"
    )
    sampling_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of scheduled sampling, along the path: that the decoder is given a draw of its own for a symbol",
    )
    slip_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="along the path: that a character is selected a frame or two beside its place, as decoding may do",
    )
    policy_weight: float = Field(
        0.0,
        ge=0,
        description="along the path, of the expected errors of what the decoder writes by itself (`policy`), per token",
    )
    policy_draws: int = Field(4, ge=2, description="of these texts, for each utterance")
    policy_temperature: float = Field(0.5, gt=0, description="of these: near 0 all are what greedy search finds")
    consistency_weight: float = Field(
        0.0,
        ge=0,
        description="of the divergence between what the CTC branch reads in two views of each utterance, per token; "
        "both views count in `batch_seconds`",
    )
    phone_weight: float = Field(
        0.0,
        ge=0,
        description="beside the CTC branch's 1, of another of phones below the last layer, which stays with the model; "
        "needs espeak-ng. Without train_encoder it alone is trained",
    )
    denominator_weight: float = Field(
        0.0,
        ge=0,
        description="beside the CTC branch's 1, of what all texts together score (`denominator`), per character; where "
        "phones alone are trained, beside that of phones, per phone",
    )
    path_weight: float = Field(0.3, ge=0, description="of the likelihood of the path, per token")
    quantity_weight: float = Field(
        0.2, ge=0, description="of the quantity loss, per token; of `attention` expected alone"
    )
    latency_weight: float = Field(
        0.05, ge=0, description="of the CTC-synchronous boundary loss, per frame; of `attention` expected alone"
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="of the target mass, spread over the vocabulary")
    neighbour_smoothing: tuple[Mass, ...] = Field(
        (), description="relative target mass of the tokens around each and, in the middle, its own; instead of that"
    )
    noise_std: float = Field(
        1.0,
        ge=0,
        description="before the sigmoid of the monotonic attention, at full strength; of `attention` expected alone",
    )
    noise_full_at: float = Field(
        0.7, ge=0, le=1, description="progress at which that noise has grown to full strength; of the same alone"
    )
    spec_augment_from: float = Field(0.15, ge=0, le=1, description="progress from which features are masked")

    min_seconds: float = Field(0.3, ge=0)
    max_seconds: float = Field(20.0, gt=0)
    evaluate_every: int = Field(1000, gt=0)
    save_every: int = Field(500, gt=0)
    final: Literal["average", "best"] = Field(
        "average", description="of the last checkpoints, or the best of all evaluations on dev (average without dev)"
    )
    average_last: int = Field(5, ge=1, description="checkpoints kept, and averaged at the end")
    augment: AugmentConfig = AugmentConfig()

    def changed(self, settings: Iterable[str]) -> Self:
        """With fields as in "batch_seconds=600" or "augment.gain_db=[-8, 8]": values in JSON, or else plain text.

        Raises ValueError for a field that there is not, or a value that it cannot have.
        """
        fields = self.model_dump()
        for setting in settings:
            path, equals, value = setting.partition("=")
            *outer, name = path.split(".")
            place: Any = fields
            for part in outer:
                place = place.get(part) if isinstance(place, dict) else None
            if not equals or not isinstance(place, dict) or name not in place:
                raise ValueError(f"{setting!r}: not NAME=VALUE of a field of the recipe, or NAME.NAME=VALUE")
            place[name] = _read(value)
        return self.model_validate(fields)

    @property
    def phones_alone(self) -> bool:
        """Whether the head of phones is all that is trained."""
        return self.phone_weight > 0 and not self.train_encoder

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        if self.neighbour_smoothing and (self.label_smoothing or len(self.neighbour_smoothing) % 2 == 0):
            raise ValueError("neighbour_smoothing has an odd number of weights, and label_smoothing is 0 beside it")
        if self.neighbour_smoothing and not any(self.neighbour_smoothing):
            raise ValueError("neighbour_smoothing has a weight that is not 0")
        if self.sampling_probability and self.attention != "path":
            raise ValueError("sampling_probability is of training along the path")
        if self.slip_probability and self.attention != "path":
            raise ValueError("slip_probability is of training along the path")
        if self.policy_weight and (self.attention != "path" or self.units != "characters"):
            raise ValueError("policy_weight is of training along the path, and of characters, which make words")
        if self.phone_weight and self.units != "characters":
            raise ValueError("phone_weight is of characters: words that are spelled can be said")
        if self.denominator_weight and self.units != "characters":
            raise ValueError("denominator_weight is of characters: there are too many pairs of words")
        if self.phones_alone and self.ctc_only != 1:
            raise ValueError("without train_encoder phones alone are trained, so that ctc_only is 1")
        if not self.train_encoder and 0 < self.ctc_only < 1:
            raise ValueError("without train_encoder ctc_only is 0 or 1: nothing would be trained until then")
        return self


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
