"""Files that commands write: tried before the work, which would else be lost to a directory that is not there."""

import os
from pathlib import Path


class OutputError(OSError):
    """A file that cannot be written; the message names it."""


def make_ready(path: Path) -> None:
    """Make the directory of a file that is to be written; raises OutputError where it could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error})") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a directory" if path.is_dir() else "permission denied"
        raise OutputError(f"{path}: cannot be written ({why})")


def make_ready_for_picture(path: Path) -> None:
    """The same for a file of a picture, whose kind its name says."""
    if path.suffix not in (".png", ".svg"):
        raise OutputError(f"{path}: a picture is .png or .svg")
    make_ready(path)
