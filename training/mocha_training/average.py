"""Average the weights of several checkpoints into one that takes half the space."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mocha_model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint


def average_checkpoints(paths: Sequence[Path], target: Path) -> None:
    """Write the mean of the floating-point tensors of `paths` to `target`, as float16; the rest is the last one's.

    It has a head of phones if all have one of the same.

    Raises:
        CheckpointError: there is nothing to average, the checkpoints differ in configuration (by more than dropout in
            the encoder, how far apart features are and how they are searched), or a weight of the mean is not a number
            of float16.

    """
    loaded = [load_checkpoint(path) for path in paths]
    if not loaded or any(c.config.network() != loaded[-1].config.network() for c in loaded):
        raise CheckpointError("averaging needs checkpoints of one configuration")
    if any(c.config.phones != loaded[-1].config.phones for c in loaded):
        for c in loaded:
            c.model.give_phones((), None)
    states = [c.model.state_dict() for c in loaded]
    last = loaded[-1]
    last.model.load_state_dict(
        {
            name: torch.stack([s[name] for s in states]).mean(0) if tensor.is_floating_point() else tensor
            for name, tensor in states[-1].items()
        }
    )
    for name, tensor in last.model.half().state_dict().items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{target} is not written: {name} has values that float16 does not")
    save_checkpoint(target, last.model, last.tokenizer, last.provenance | {"averaged": len(loaded)})
