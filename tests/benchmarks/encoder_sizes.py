"""What a larger encoder costs the server: CPU time of the recogniser for each second of a live stream.

Networks of random weights, 64 streams of noise that move on together in blocks of 80 ms, as the engine's do; nothing
is emitted, so the decoder rests. The sizes take turns, several times, and the least time of each counts, since other
work on the machine only adds. Run it as `python tests/benchmarks/encoder_sizes.py`.
"""

import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mocha_model.config import SAMPLE_RATE, small
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer

# LSTM layers, and states of each.
SIZES = ((3, 320), (3, 448), (5, 448), (3, 512), (3, 576), (4, 576), (3, 640), (3, 704), (3, 768))
SMALL = (3, 320)
STREAMS, BLOCK, BLOCKS, TURNS = 64, SAMPLE_RATE * 80 // 1000, 40, 5


def recogniser(layers: int, states: int) -> Recognizer:
    """One of these sizes, else as the preset `small`."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz '"])
    config = small(tokenizer.vocab_size)
    encoder = config.encoder.model_copy(update={"lstm_sizes": (states,) * layers, "projection_size": states})
    return Recognizer(SpeechModel(config.model_copy(update={"encoder": encoder})).eval(), tokenizer)


@torch.inference_mode()
def cpu_ms(recogniser: Recognizer) -> float:
    """CPU time for each second of a stream, ms."""
    state, num_samples = recogniser.init_state(STREAMS), torch.full((STREAMS,), BLOCK)
    blocks = 0.05 * torch.randn(BLOCKS, STREAMS, BLOCK)
    _, state = recogniser.step(blocks[0], num_samples, state)
    began = time.process_time()
    for block in blocks[1:]:
        _, state = recogniser.step(block, num_samples, state)
    heard_s = STREAMS * (BLOCKS - 1) * BLOCK / SAMPLE_RATE
    return 1000 * (time.process_time() - began) / heard_s


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    built = {size: recogniser(*size) for size in SIZES}
    least = dict.fromkeys(SIZES, float("inf"))
    for _ in track(range(TURNS), "turns", console=Console(stderr=True)):
        for size, each in built.items():
            least[size] = min(least[size], cpu_ms(each))
    table = Table("LSTM layers", "parameters, M", "CPU ms per second of a stream", "times 3 x 320")
    for (layers, states), found in least.items():
        size = f"{built[layers, states].model.num_parameters / 1e6:.2f}"
        table.add_row(f"{layers} x {states}", size, f"{found:.2f}", f"{found / least[SMALL]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
