"""`file:` URLs to bytes, under the directories that the operator allows and nowhere else. Called by `fetch.py`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.url import refuse, too_large

_NOT_UNDER = "is not under the server's allowed_local_media_path"


def read_file_url(url: str, config: MediaConfig) -> bytes:
    """Symbolic links are followed before the check. Raises MediaError."""
    allowed = [part for part in config.allowed_local_media_path.split(os.pathsep) if part]
    if not allowed:
        raise MediaError("file: URLs are refused: the server has no allowed_local_media_path")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or "\0" in (path := unquote(parts.path)):
            raise refuse(url, "does not name a path on the server")
        roots = [Path(part).resolve() for part in allowed]
        resolved = Path(path).resolve()
        if not _is_under(resolved, roots):
            raise refuse(url, _NOT_UNDER)
        return _read_regular(url, resolved, roots, config.max_image_bytes)
    except OSError as error:
        raise refuse(url, f"cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # the library's word for it
        raise refuse(url, "leads into a loop of symbolic links") from error
    except ValueError as error:  # no URL, or no name that a file can have
        raise refuse(url, "is not a valid file: URL") from error


def _is_under(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _read_regular(url: str, path: Path, roots: Sequence[Path], max_bytes: int) -> bytes:
    """Read what was opened, not what the name leads to later: the name may be swapped meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        opened = Path(f"/proc/self/fd/{descriptor}")
        if opened.exists() and not _is_under(opened.resolve(), roots):
            raise refuse(url, _NOT_UNDER)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refuse(url, "is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise too_large(url, max_bytes)
    return content
