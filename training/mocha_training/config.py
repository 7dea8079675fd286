"""Everything a training run is told, in one typed object that travels in its checkpoints. No tensors, no paths."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mocha_training.augment import AugmentConfig


class TrainConfig(BaseModel):
    """Optimisation, losses and schedule. "Progress" below runs from 0 to 1 over the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    steps: int = Field(20_000, gt=0, description="length of the run, unless the time budget ends it first")
    max_minutes: float = Field(0.0, ge=0, description="time budget that the schedules are stretched over; 0 for none")
    batch_seconds: float = Field(160.0, gt=0, description="audio per batch, padding included")
    bf16: bool = True

    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(200, ge=1)
    scalar_rate: float = Field(20.0, gt=0, description="times the learning rate for g and r of the attention energies")
    weight_decay: float = Field(1e-2, ge=0)
    clip: float = Field(5.0, gt=0, description="largest norm of the whole gradient")

    ctc_only: float = Field(0.35, ge=0, lt=1, description="progress until which only the CTC branch is trained")
    ctc_weight: float = Field(0.4, ge=0, description="beside 1 - this for the decoder, after that")
    attention: Literal["expected", "path"] = Field(
        "expected", description="over all alignments (the papers), or along the CTC branch's own forced alignment"
    )
    path_weight: float = Field(0.3, ge=0, description="of the likelihood of the path, per token")
    quantity_weight: float = Field(0.2, ge=0)
    latency_weight: float = Field(0.05, ge=0, description="of the CTC-synchronous boundary loss, per frame")
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    noise_std: float = Field(1.0, ge=0, description="before the sigmoid of the monotonic attention, at full strength")
    noise_full_at: float = Field(0.7, ge=0, le=1, description="progress at which the noise has grown to full strength")
    spec_augment_from: float = Field(0.15, ge=0, le=1, description="progress from which features are masked")

    min_seconds: float = 0.3
    max_seconds: float = 20.0
    evaluate_every: int = Field(1000, gt=0)
    save_every: int = Field(500, gt=0)
    average_last: int = Field(5, ge=1, description="checkpoints averaged at the end")
    augment: AugmentConfig = AugmentConfig()
