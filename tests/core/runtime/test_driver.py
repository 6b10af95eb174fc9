"""Calls of the CUDA driver: which threads let others record graphs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tierfall.core.runtime import driver

THREAD_LOCAL = 1


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The names of threads that changed their mode, and the modes."""
    found: list[tuple[str, int]] = []

    def exchange(mode: Any) -> int:
        value = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value
        found.append((threading.current_thread().name, value))
        return 0

    monkeypatch.setattr(driver, "driver_call", lambda name: exchange)
    return found


def on_thread(name: str, do: Callable[[], None]) -> None:
    thread = threading.Thread(target=do, name=name)
    thread.start()
    thread.join()


def test_threads_of_tierfall_change_their_mode_once(modes: list[tuple[str, int]]) -> None:
    def twice() -> None:
        driver.let_others_record()
        driver.let_others_record()

    on_thread("tierfall-run-capture", twice)
    assert modes == [("tierfall-run-capture", THREAD_LOCAL)]


def test_threads_of_the_user_keep_their_mode(modes: list[tuple[str, int]]) -> None:
    """Else a recording there would not notice what breaks it."""
    driver.let_others_record()
    on_thread("loader", driver.let_others_record)
    assert modes == []


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "driver_call", lambda name: None)
    on_thread("tierfall-run-capture", driver.let_others_record)
