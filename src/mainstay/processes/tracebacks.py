"""The traceback of what a function, a step or a task raised, as its record keeps it: bounded, of the host's code.

It shows what Python's own traceback shows: files, lines and source, and no values of variables.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from mainstay.model.codec import clean_text

log = logging.getLogger("mainstay.processes")

MAX_TRACEBACK = 4_000
"""Characters. The innermost calls are at the end, so the end is what is kept."""
_OURS = str(Path(__file__).parents[1])


def log_raised(what: str, error: BaseException) -> None:
    """Log that code of the host's raised, with its traceback."""
    whole = _whole(error)
    if clean_text(whole) == whole:
        log.warning("%s", what, exc_info=error)
    else:  # no file takes this text as it is, and the line would be lost
        log.warning("%s\n%s", what, clean_text(whole))


def traceback_text(error: BaseException) -> str:
    """The traceback of an exception that was raised, as a record keeps it; "" for one that was not raised."""
    text = clean_text(_whole(error)) if error.__traceback__ is not None else ""
    if len(text) <= MAX_TRACEBACK:
        return text
    return f"… (the last {MAX_TRACEBACK:,} of {len(text):,} characters)\n{text[-MAX_TRACEBACK:]}"


def _whole(error: BaseException) -> str:
    try:
        whole = traceback.TracebackException.from_exception(error)
        _leave_out_ours(whole, set())
        return "".join(whole.format()).strip()
    except Exception:  # code of the exception's own runs here; its type and text are recorded beside this
        return ""


def _leave_out_ours(whole: traceback.TracebackException, seen: set[int]) -> None:
    """Remove the calls inside of Mainstay, unless there are no others, here and in what led to it."""
    if id(whole) in seen:
        return
    seen.add(id(whole))
    theirs = [frame for frame in whole.stack if not frame.filename.startswith(_OURS)]
    if theirs:
        whole.stack = traceback.StackSummary.from_list(theirs)
    for cause in (whole.__cause__, whole.__context__, *(getattr(whole, "exceptions", None) or ())):
        if cause is not None:
            _leave_out_ours(cause, seen)
