"""Paths as a user gives them: a home folder written as `~`, and what is a file that can be read."""

import stat
from pathlib import Path

# what a path may lead to that is no file; a named pipe waits forever, a device may never end
KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def user_path(path: str | Path, field: str) -> Path:
    """A path with the home folder in place of `~`.

    Args:
        path: Path as it stands in the config.
        field: The field it comes from, for the message: "data.path".

    Raises:
        ValueError: There is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or one without a home folder
        raise ValueError(
            f"{field}={path}: there is no home folder for {Path(path).parts[0]}; "
            "write the whole path"
        ) from None


def check_is_file(path: Path, what: str) -> None:
    """Refuse what opens like a file and never ends, or never begins.

    A path that does not exist, or is a folder, is left to the code that opens it.

    Args:
        path: File to be read.
        what: It should be, for the message: "text".

    Raises:
        ValueError: A pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    for is_kind, name in KINDS:
        if is_kind(mode):
            raise ValueError(
                f"{what} {path} is {name}: it is read more than once, give the path of a file"
            )
