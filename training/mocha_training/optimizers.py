"""How parameters are learned: Adam for all, or Muon for the matrices and Adam for the rest; by which gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mocha_model.model import SpeechModel
from mocha_training.config import TrainConfig
from mocha_training.phone_branch import RATE
from mocha_training.weights import weight_matrices


def make_optimizers(model: SpeechModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Optimizers over disjoint parameters; each group has a ``factor`` of the learning rate.

    Adam learns a head of phones, beside an encoder faster than it (`phone_branch.RATE`).

    Muon (Jordan et al. 2024) gives a matrix the orthogonal one nearest to its momentum; scaled so that its entries
    move as far as Adam's would (Liu et al. 2025), it takes Adam's learning rate and weight decay.
    """
    scalars = _ids(model.decoder.attention.energies.scalars)
    matrices = _ids(_matrices(model)) if config.muon else set[int]()
    branch = list(model.phones.parameters()) if model.phones and config.train_encoder else []
    others = matrices | _ids(branch)
    named = [p for p in model.parameters() if id(p) not in others]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": config.weight_decay, "factor": 1.0},
        {
            "params": [p for p in named if p.dim() <= 1 and id(p) not in scalars],
            "weight_decay": 0.0,
            "factor": 1.0,
        },
        {"params": [p for p in named if id(p) in scalars], "weight_decay": 0.0, "factor": config.scalar_rate},
    ]
    if branch:
        groups.append({"params": branch, "weight_decay": config.weight_decay, "factor": RATE})
    adam = torch.optim.Adam(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        decoupled_weight_decay=config.decoupled_decay,
    )
    if not config.muon:
        return [adam]
    of_matrices = [{"params": _matrices(model), "factor": 1.0}]
    rates = (config.learning_rate, config.weight_decay)
    return [adam, torch.optim.Muon(of_matrices, *rates, adjust_lr_fn="match_rms_adamw")]


def _matrices(model: SpeechModel) -> list[nn.Parameter]:
    """Maps from one space to another.

    The rows of the embedding and of the output layers belong to single symbols, those of v to single energy functions.
    """
    tables = _ids([model.decoder.embedding.weight, model.decoder.output.weight, model.ctc.weight])
    tables |= _ids(model.phones.parameters() if model.phones else ())
    return [p for _, p in weight_matrices(model) if p.dim() == 2 and id(p) not in tables]


def _ids(parameters: Any) -> set[int]:
    return {id(p) for p in parameters}


def average_gradients(parameters: Sequence[nn.Parameter], numbers: list[float], num_processes: int) -> list[float]:
    """Average `numbers` and, in place, the gradients over all processes, in one exchange."""
    if num_processes == 1:
        return numbers
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [torch.tensor(numbers, device=parameters[0].device)])
    torch.distributed.all_reduce(flat)
    flat /= num_processes
    parts = torch.split(flat, [g.numel() for g in grads] + [len(numbers)])
    for grad, part in zip(grads, parts, strict=False):
        grad.copy_(part.view_as(grad))
    return [float(x) for x in parts[-1]]
