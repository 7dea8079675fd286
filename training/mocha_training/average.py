"""Average the weights of several checkpoints into one that takes a third of the space."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mocha_model.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from mocha_model.model import SpeechModel
from mocha_training.beginnings import without_phones
from mocha_training.weights import grown


def average_checkpoints(paths: Sequence[Path], target: Path) -> bool:
    """Write the mean of the floating-point tensors of `paths` to `target`, compact; the rest is the last one's.

    But the calibrations of confidence, which were fitted to other weights: returns whether that one had any.

    It has a head of phones if all have one; what one lacks of the phones of that with most is there as in that one. It
    looks ahead if one does, and the others are grown to.

    Raises:
        CheckpointError: there is nothing to average, the checkpoints differ in configuration (by more than dropout in
            the encoder, how far apart features are and how they are searched) or in what their symbols mean, or a
            weight of the mean is not a number of float16.

    """
    loaded = _looking_ahead_alike([load_checkpoint(path) for path in paths])
    if not loaded or any(c.config.network() != loaded[-1].config.network() for c in loaded):
        raise CheckpointError("averaging needs checkpoints of one configuration")
    if len({(c.tokenizer.units, c.tokenizer.symbols) for c in loaded}) > 1:
        raise CheckpointError("averaging needs checkpoints of one vocabulary")
    had_phones = any(c.config.phones for c in loaded)
    _share_phones([c.model for c in loaded])
    states = [c.model.state_dict() for c in loaded]
    last = loaded[-1]
    last.model.load_state_dict(
        {
            name: torch.stack([s[name] for s in states]).mean(0) if tensor.is_floating_point() else tensor
            for name, tensor in states[-1].items()
        }
    )
    if had_phones and not last.config.phones:
        search = without_phones(last.config.search)
        last.model.config = last.config.model_copy(update={"search": search})
    save_checkpoint(target, last.model, last.tokenizer, last.provenance | {"averaged": len(loaded)}, compact=True)
    return last.calibration is not None or last.file_calibration is not None


def _looking_ahead_alike(loaded: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those that do not look ahead grown to what one of the others does, by which they compute what they did."""
    most = max((c.config.encoder.look_ahead for c in loaded), default=0)
    alike = []
    for c in loaded:
        if most and not c.config.encoder.look_ahead:
            model = grown(c.model, c.config.with_look_ahead(most))
            c = replace(c, model=model)
        alike.append(c)
    return alike


def _share_phones(models: Sequence[SpeechModel]) -> None:
    """Give all the phones of the one with most; none where another has none, or phones that this one has not."""
    most = max(models, key=lambda model: len(model.config.phones))
    phones = most.config.phones
    heads = [model.phones for model in models]
    if None in heads or not all(set(model.config.phones) <= set(phones) for model in models):
        for model in models:
            model.give_phones((), None)
        return
    for model, head in zip(models, heads, strict=True):
        assert head is not None
        shared = copy.deepcopy(most.phones)
        assert shared is not None
        rows = [0, *(1 + phones.index(phone) for phone in model.config.phones)]  # 0 is the blank
        with torch.no_grad():
            shared.weight[rows], shared.bias[rows] = head.weight, head.bias
        model.give_phones(phones, shared)
