"""What a run leaves in its directory: numbered checkpoints, and the state that it goes on from."""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from mocha_model.checkpoint import write_whole
from mocha_model.model import SpeechModel

LAST = "last.pt"
PARTS = {"model", "optimizers", "position"}  # of a state, in all versions
ANOTHER = "the run's last checkpoint can begin one in another directory"


def numbered(directory: Path, until: int) -> list[Path]:
    """The checkpoints until that step, oldest first; later ones are of a run that was killed as it wrote."""
    found = {int(path.stem.split("-")[1]): path for path in directory.glob("step-*.safetensors")}
    return [found[step] for step in sorted(found) if step <= until]


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Keep `state`, whole or not at all; raises OSError, which names the file."""
    written = io.BytesIO()
    torch.save(state, written)
    write_whole(directory / LAST, written.getbuffer())


def read_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """What was kept; None where nothing was. Raises ValueError where it is damaged, or only checkpoints are there."""
    if not path.is_file():
        _refuse_checkpoints(path.parent)
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: not a run's state, or truncated; {ANOTHER}") from error
    if not isinstance(state, dict) or not state.keys() >= PARTS:
        raise ValueError(f"{path}: not a run's state; {ANOTHER}")
    return state


def _refuse_checkpoints(directory: Path) -> None:
    """Raise ValueError where another run has left some, which a new one would average and remove."""
    names = ("step-*", "best", "final")
    if found := [path for name in names for path in sorted(directory.glob(f"{name}.safetensors"))]:
        lacking = f"has {found[0].name} of a run, and no {LAST} to go on from"
        raise ValueError(f"{directory}: {lacking}. Another run needs another directory")


def restore(path: Path, state: dict[str, Any], model: SpeechModel, optimizers: Sequence[Optimizer]) -> None:
    """Take weights and optimizers from `state`, which is that of `path`. Raises ValueError where they do not fit.

    That they do not is only met in files of versions before; else `refuse_other` has seen it.
    """
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"{path}: the run was begun with another network") from error
    try:
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    except ValueError as error:
        other = "its optimizers are of other parameters, as in versions before"
        raise ValueError(f"{path}: {other}; {ANOTHER}") from error
