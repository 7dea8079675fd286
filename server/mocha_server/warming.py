"""Steps on silence before the first stream, one of each shape that the scheduler may choose.

The libraries below keep kernels and buffers for each shape they have met, and the largest step needs most memory to
work in. What is claimed here belongs to the server; claimed later, it would seem to be the streams'.
"""

import torch

from mocha_model.recognizer import Recognizer, RecognizerState
from mocha_model.streaming import first_rows
from mocha_server.scheduler import Scheduler

SLACK_BYTES = 64 << 20  # claimed besides: steps of changing shapes do not fit exactly where earlier ones were


@torch.inference_mode()
def warm_up(recognizer: Recognizer, scheduler: Scheduler) -> None:
    """Largest steps first, so that what smaller ones need is found in what is free again."""
    device, most = recognizer.model.features.mean.device, scheduler.max_rows
    fresh = scheduler.block - scheduler.head_start
    state = _step(recognizer, most, fresh, recognizer.init_state(most))
    for take in scheduler.takes()[::-1]:
        for rows in scheduler.sizes(take)[::-1]:
            _step(recognizer, rows, take, state)
    for rows in scheduler.sizes(0)[::-1]:
        ragged = torch.arange(rows, device=device) * scheduler.block // rows
        silence = torch.zeros(rows, scheduler.block, device=device)
        _, after = recognizer.step(silence, ragged, first_rows(state, rows))
        recognizer.flush(after, torch.ones(rows, dtype=torch.bool, device=device))
    if device.type == "cpu":
        torch.zeros(SLACK_BYTES, dtype=torch.uint8)


def _step(recognizer: Recognizer, rows: int, size: int, state: RecognizerState) -> RecognizerState:
    silence = torch.zeros(rows, size, device=recognizer.model.features.mean.device)
    num_samples = torch.full((rows,), size, device=silence.device)
    return recognizer.step(silence, num_samples, first_rows(state, rows))[1]
