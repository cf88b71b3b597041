"""Ctrl-C in a turn of a pool is raised at a safe place, and lost nowhere."""

import os
import signal
import threading
import time

import pytest

from labcode.pool.turn import Turn


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python calls the handler between two bytecodes


def test_ctrl_c_waits_for_the_place_that_asks_for_it():
    turn = Turn()
    reached = []
    with pytest.raises(KeyboardInterrupt), turn:
        interrupt()
        reached.append("after the signal")
        turn.raise_interrupt()
        reached.append("after the safe place")
    assert reached == ["after the signal"]


def test_ctrl_c_is_raised_at_the_end_of_the_outermost_turn_at_the_latest():
    turn = Turn()
    reached = []
    with pytest.raises(KeyboardInterrupt), turn:
        with turn:
            interrupt()
        reached.append("after the inner turn")
    assert reached == ["after the inner turn"]


def test_after_a_turn_ctrl_c_is_raised_at_once_again():
    turn = Turn()
    with turn:
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_error_of_the_call_is_not_replaced_by_the_interrupt_and_the_next_turn_is_free_of_it():
    turn = Turn()
    with pytest.raises(ValueError, match="of the call"), turn:
        interrupt()
        raise ValueError("of the call")
    with turn:
        turn.raise_interrupt()


def test_a_handler_of_the_programs_own_stays():
    turn = Turn()
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with turn:
            interrupt()
            assert seen == [signal.SIGINT]
            turn.raise_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_take_turns_and_leave_the_handler_alone():
    turn = Turn()
    inside = []
    most = []

    def call() -> None:
        with turn:
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
