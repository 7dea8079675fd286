"""One .safetensors file: weights, configuration, vocabulary, normalisation and provenance. Never pickle.

A compact one takes a byte for each weight of the encoder's LSTM layers: an integer, times a scale of its row. They are
the integers that streams multiply anyway (`quantized`), so what is read is what the weights before would have read.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mocha_model.confidence import Calibration
from mocha_model.config import ModelConfig
from mocha_model.model import SpeechModel
from mocha_model.quantized import dequantized, in_integers
from mocha_model.tokenizer import Tokenizer, Units

FORMAT = "mocha-asr/2"
FORMATS = (FORMAT, "mocha-asr/1")  # the first had no integers, so it can be read in the same way
SCALE = ".scale"  # after the name of a weight in integers: what each of its rows is to be multiplied by
BUNDLED = Path(__file__).parent / "checkpoints" / "default.safetensors"


class CheckpointError(ValueError):
    """A file that is not a usable checkpoint; the message says why and names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode with everything needed to use it."""

    model: SpeechModel
    tokenizer: Tokenizer
    provenance: dict[str, Any]
    calibration: Calibration | None = None  # of the confidence of words read greedily
    file_calibration: Calibration | None = None  # of those read as files are

    @property
    def config(self) -> ModelConfig:
        """What the model is built of."""
        return self.model.config


def save_checkpoint(
    path: str | Path,
    model: SpeechModel,
    tokenizer: Tokenizer,
    provenance: dict[str, Any],
    compact: bool = False,
) -> None:
    """Write `model` with its vocabulary and a JSON-able `provenance`; atomically.

    Weights are in the dtype they have or, if `compact`, those of the encoder's LSTM layers int8, all others float16.

    Raises:
        CheckpointError: nothing is written, since a weight of a compact one is not a number of float16.

    """
    metadata = {
        "format": FORMAT,
        "config": model.config.model_dump_json(),
        "vocabulary": json.dumps(tokenizer.symbols, ensure_ascii=False),
        "units": tokenizer.units,
        "provenance": json.dumps(provenance, ensure_ascii=False),
    }
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    write_whole(Path(path), save(_compact(weights, path) if compact else weights, metadata))


def calibrate_checkpoint(path: Path, calibration: Calibration, file_calibration: Calibration) -> None:
    """Give the checkpoint at `path` other calibrations; all else stays as it is. Raises CheckpointError."""
    load_checkpoint(path)
    fitted = {
        "calibration": calibration.model_dump_json(),
        "file_calibration": file_calibration.model_dump_json(),
    }
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **fitted}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    write_whole(path, save(weights, metadata))


def _compact(weights: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    compact = {}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            compact[name] = weight
        elif name.startswith(("encoder.stack.", "encoder.look_ahead.")) and weight.ndim == 2:
            compact[name], compact[name + SCALE] = in_integers(weight.float())
        else:
            compact[name] = weight.half()
        if not compact.get(name + SCALE, compact[name]).isfinite().all():
            raise CheckpointError(f"{path} is not written: {name} has values that float16 does not")
    return compact


def _restored(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint as float32; raises KeyError for integers without a scale."""
    weights = {name: t.float() if t.is_floating_point() else t for name, t in stored.items()}
    for name in [name for name, t in stored.items() if t.dtype == torch.int8]:
        weights[name] = dequantized(stored[name], weights.pop(name + SCALE))
    return weights


def write_whole(target: Path, data: bytes | memoryview) -> None:
    """Write a file that is there whole or not at all; with the permissions of other new files, unlike `save_file`.

    Raises OSError, which names it.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(target)) from error


def load_checkpoint(path: str | Path | None = None, device: str = "cpu") -> Checkpoint:
    """Read a checkpoint (the bundled one if `path` is None) onto `device`, weights as float32.

    Raises:
        CheckpointError: the file is missing, truncated, of another kind, or its parts do not fit together.

    """
    path = BUNDLED if path is None else Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    try:
        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file, perhaps truncated ({error})") from error
    if metadata.get("format") not in FORMATS:
        raise CheckpointError(f"{path}: not a {FORMAT} checkpoint (its format says {metadata.get('format')!r})")
    try:
        config = ModelConfig.model_validate_json(metadata["config"])
        tokenizer = Tokenizer(json.loads(metadata["vocabulary"]), cast(Units, metadata.get("units", "characters")))
        provenance = dict(json.loads(metadata["provenance"]))
        fitted = [metadata.get(name) for name in ("calibration", "file_calibration")]
        calibrations = [Calibration.model_validate_json(json_) if json_ else None for json_ in fitted]
        if tokenizer.vocab_size != config.vocab_size:
            raise ValueError(f"{tokenizer.vocab_size} symbols for a model of {config.vocab_size}")
        model = SpeechModel(config)
        model.load_state_dict(_restored(weights))
        if not all(t.isfinite().all() for t in weights.values()):
            raise ValueError("there are weights that are no finite numbers")
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # ValidationError is a ValueError
        raise CheckpointError(f"{path}: its parts do not fit together ({error})") from error
    return Checkpoint(model.to(torch.device(device)).eval(), tokenizer, provenance, *calibrations)
