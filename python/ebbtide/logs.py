"""The logger "ebbtide": what operations moved at INFO, each tag of them at DEBUG.

EBBTIDE_LOG sets the logger's level, unless the program has set one; without either it is that of the root logger,
which lets warnings through. As long as no handler takes the lines, they go to stderr, in the form of the core's own
lines, which stay there in any case.

Lines are logged when an operation is over and no lock of this package is held, so that a handler may use ebbtide,
raise, or be interrupted.
"""

import contextlib
import logging
import os
import sys
import traceback
import warnings
from typing import Any

from ebbtide import settings
from ebbtide.locks import writing

logger = logging.getLogger("ebbtide")


class _StderrWithoutHandlers(logging.Handler):
    """Writes "ebbtide: <message>" to stderr, as the core does, if no handler of the program takes the record."""

    def emit(self, record: logging.LogRecord) -> None:
        if _has_other_handlers(self):
            return
        try:
            if sys.stderr is not None:
                with writing:
                    sys.stderr.write(f"ebbtide: {record.getMessage()}\n")
                    sys.stderr.flush()
        except Exception:
            self.handleError(record)


def is_enabled(level: int = logging.INFO) -> bool:
    """Whether a line of this level goes anywhere. Ask before building its text."""
    return logger.isEnabledFor(level)


def log(level: int, text: str, *values: Any) -> None:
    """Logs one line. An exception of a handler becomes a warning, since the operation that it reports stands."""
    try:
        logger.log(level, text, *values)
    except Exception as error:
        warn_of(error, f"a handler of the logger 'ebbtide' failed: {error!r}")


def warn_of(error: BaseException, text: str) -> None:
    """Warns of an exception that ended nothing. Where warnings are errors, or the program's own way to show them fails,
    it is printed.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:
        with contextlib.suppress(Exception):
            traceback.print_exception(error)


def _has_other_handlers(own: logging.Handler) -> bool:
    at: logging.Logger | None = logger
    while at is not None:
        if any(each is not own and not isinstance(each, logging.NullHandler) for each in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def _set_up() -> None:
    logger.addHandler(_StderrWithoutHandlers())
    try:
        word = settings.read("log", os.environ)
    except ValueError:  # the core has said so
        return
    if word and logger.level == logging.NOTSET:
        logger.setLevel(word.upper())


_set_up()
