"""Files that pictures are written to: their formats, and whether they, or any file, can be written.

A command may work for minutes before it draws. So it checks its targets first.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import DashError

__all__ = [
    "FORMATS",
    "PictureError",
    "PlotsMissingError",
    "check_path",
    "check_writable",
    "prepare_folder",
    "require_matplotlib",
    "require_writable",
]

FORMATS = ("svg", "png")


class PictureError(DashError, ValueError):
    """A picture was asked for in a format, in a place, or of a timeline, that cannot be drawn."""


class PlotsMissingError(DashError, ImportError):
    """Matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise PlotsMissingError unless Matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        message = "pictures need Matplotlib, which is not installed: pip install 'dash-attn[plots]'"
        raise PlotsMissingError(message) from error


def check_path(path: str | Path) -> Path:
    """The path, if its suffix is a format of pictures.

    Raises:
        PictureError: another suffix.
    """
    path = Path(path)
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise PictureError(
            f"a picture is written as .svg or .png, got suffix {path.suffix!r} of {path.name!r}"
        )
    return path


def require_writable(path: str | Path) -> Path:
    """Check before any work that a picture can be written. A file that exists keeps its bytes.

    Raises:
        PictureError: another suffix, or the file cannot be written.
        PlotsMissingError: Matplotlib is not installed.
    """
    path = check_path(path)
    require_matplotlib()
    try:
        check_writable(path)
    except OSError as error:
        raise PictureError(f"cannot write {path}: {error.strerror}") from error
    return path


def check_writable(path: Path) -> None:
    """Raise OSError unless a file can be written. One that exists keeps its bytes; none is made.

    A pipe is not looked at: nobody may read from it yet.
    """
    if path.is_fifo():
        return
    try:
        if path.exists():
            path.open("ab").close()
        else:  # a link may lead to a file that is not there
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
            if path.is_symlink() and os.path.realpath(path) == str(path.absolute()):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def prepare_folder(folder: str | Path, names: Sequence[str]) -> Path:
    """Make a folder if need be, and check before any work that its pictures can be written.

    Args:
        folder: where the pictures go.
        names: of the files.

    Raises:
        PictureError: the folder cannot be made, or a file in it cannot be written.
        PlotsMissingError: Matplotlib is not installed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PictureError(f"cannot make the folder {folder}: {error.strerror}") from error
    for name in names:
        require_writable(folder / name)
    return folder
