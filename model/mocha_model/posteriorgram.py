"""An LSTM over posteriorgrams: what the CTC heads make of each frame becomes the memory that the decoder attends to.

Posteriorgrams say what is heard and not how it sounds, so the decoder can learn from text as well: posteriorgrams of
sentences that nobody has said are put together of recorded ones (text injection: Thomas et al. 2022, "textograms";
Sainath et al. 2022, JOIST). Knows nothing of the encoder or of text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.config import PosteriorgramConfig
from mocha_model.encoder import LSTMLayer, RecurrentState
from mocha_model.streaming import SlidingWindow, WindowState

LEAST = -12.0  # of a log-probability: below, there is nothing to be told apart
SCALE = 0.25  # log-probabilities from `LEAST` to 0 become numbers from -2 to 1


def posteriorgram(labels: Tensor, phones: Tensor | None) -> Tensor:
    """What is kept of each frame [B, T, V + P] float32, natural logarithms from `LEAST` to 0.

    `labels` [B, T, V] are scores of the CTC head, `phones` [B, T, P] log-probabilities of the head of phones, if any.
    """
    parts = [labels.float().log_softmax(-1)] + ([] if phones is None else [phones])
    return torch.cat(parts, -1).clamp(min=LEAST)


@dataclass(frozen=True)
class PosteriorgramState:
    """The characters heard in the last frames, and the LSTM's state."""

    heard: WindowState
    lstm: RecurrentState


class PosteriorgramEncoder(nn.Module):
    """Posteriorgrams [B, T, V + P] to the decoder's memory [B, T, D], frame by frame; causal.

    With a delay of n frames, the LSTM is given the characters of n - 1, n and n + 1 frames ago beside what is heard
    now: a character is selected when that which follows it has been heard, and exactly when is not to be remembered.
    """

    def __init__(self, num_characters: int, num_phones: int, delay_frames: int, config: PosteriorgramConfig) -> None:
        """`num_characters` is V and `num_phones` P, 0 for none."""
        super().__init__()
        self.num_characters = num_characters
        self.offsets = [delay_frames - 1, delay_frames, delay_frames + 1] if delay_frames > 1 else []
        self.framing = SlidingWindow(delay_frames + 2, 1)
        size = num_characters * (1 + len(self.offsets)) + num_phones
        self.layer = LSTMLayer(size, config.lstm_size, None, config.dropout)

    def init_state(self, batch_size: int) -> PosteriorgramState:
        """Zeros."""
        like, held = next(self.layer.parameters()), self.framing.width - 1
        heard = self.framing.init_state(batch_size, (self.num_characters,), held, like)
        return PosteriorgramState(heard, self.layer.init_state(batch_size))

    def step(
        self, x: Tensor, num_valid: Tensor, state: PosteriorgramState
    ) -> tuple[Tensor, Tensor, PosteriorgramState]:
        """[B, T, V + P] -> [B, T, D]."""
        x = x * SCALE + 1
        joined, _, heard = self.framing.step(x[..., : self.num_characters], num_valid, state.heard)
        starts = [self.framing.width - 1 - offset for offset in self.offsets]
        x = torch.cat([x, *(joined[:, start : start + x.shape[1]] for start in starts)], -1)
        y, num_out, lstm = self.layer.step(x, num_valid, state.lstm)
        return y, num_out, PosteriorgramState(heard, lstm)

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start."""
        y, num_out, _ = self.step(x, num_valid, self.init_state(len(x)))
        return y, num_out
