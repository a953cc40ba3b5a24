"""The old path of `tests.kit`, for test files that are being written at the same time."""

from tests.kit import SOON, Place, TellingModel, crash, noticed, overloaded, texts, until, wait_for_thread

__all__ = [
    "SOON",
    "Place",
    "TellingModel",
    "crash",
    "noticed",
    "overloaded",
    "texts",
    "until",
    "wait_for_thread",
]
