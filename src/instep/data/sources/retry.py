"""Retries of requests to a storage: errors that pass are waited for, others are named at once."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from instep.core.errors import DataError

T = TypeVar("T")

_ATTEMPTS = 8
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 8.0
# A generator of its own: those of Python, NumPy and torch belong to the training.
_JITTER = random.Random()
_REFUSED = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "NoAuthTokenError", "RefreshError")
"""Errors of storage libraries that are no PermissionError, by name: they are optional dependencies."""
_TRANSIENT_PACKAGES = ("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "httpx", "gcsfs")
_RETRIED_STATUS = (408, 425, 429)


class TruncatedRead(ConnectionError):
    """A storage returned another number of bytes than it was asked for."""


def retrying(what: str, call: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Return `call()`, repeated with growing pauses while it fails in a way that may pass; raise DataError."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except Exception as raised:  # noqa: BLE001 - all that is not repeated is raised again
            error = _origin(raised)
            if is_refusal(error):
                raise DataError(
                    f"{what}: the storage refuses access ({_words(error)}). Check the credentials: the variables and "
                    "files that its fsspec library reads, or storage_options={…}."
                ) from error
            if isinstance(error, FileNotFoundError):
                raise DataError(f"{what}: there is no such file ({_words(error)}).") from error
            if not is_transient(error):
                raise DataError(f"{what}: cannot be read: {_words(error)}.") from error
            if attempt == _ATTEMPTS:
                raise DataError(
                    f"{what}: the storage failed {_ATTEMPTS} times in a row, at last with {_words(error)}. The run "
                    "continues from its last checkpoint when the same command is given again."
                ) from error
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempt - 1))
        sleep(delay_s * _JITTER.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _origin(error: Exception) -> Exception:
    """Return what happened: for HTTP, fsspec calls every failure to look at a file FileNotFoundError."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        is_of_http = type(cause).__module__.partition(".")[0] == "aiohttp" or isinstance(cause, FileNotFoundError)
        return _origin(cause) if is_of_http else error
    return error


def is_refusal(error: BaseException) -> bool:
    """Return whether a storage does not know who asks, or does not let them."""
    return isinstance(error, PermissionError) or type(error).__name__ in _REFUSED or _status(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _RETRIED_STATUS
    if isinstance(error, (NotADirectoryError, IsADirectoryError, FileNotFoundError, PermissionError)):
        return False
    if isinstance(error, OSError) and error.errno == errno.EINVAL:  # the name of a bucket, a range beyond the end
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _TRANSIENT_PACKAGES


def _status(error: BaseException) -> int | None:
    status: Any = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
