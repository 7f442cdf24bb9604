"""Two pieces of work that take turns, and what becomes of one when the other fails."""

from __future__ import annotations

import threading

import pytest

from ppctl.comm.turns import Turns, hand_over


def piece(log: list[str], name: str, exchanges: int, failing: int | None = None):
    def work() -> None:
        for number in range(exchanges + 1):
            if number == failing:
                raise ValueError(f"{name}{number}")
            log.append(f"{name}{number}")
            if number < exchanges:
                hand_over()

    return work


@pytest.mark.parametrize(
    ("of_first", "of_second", "order"),
    [
        (2, 2, "a0 b0 a1 b1 a2 b2"),
        (0, 2, "a0 b0 b1 b2"),
        (3, 1, "a0 b0 a1 b1 a2 a3"),
        (0, 0, "a0 b0"),
    ],
)
def test_they_change_at_every_exchange_until_one_has_ended(of_first, of_second, order):
    log: list[str] = []
    turns = Turns()
    for _ in range(3):
        log.clear()
        turns.run(piece(log, "a", of_first), piece(log, "b", of_second))
        assert log == order.split()
        assert Turns.current is None


def test_never_do_both_run():
    running = threading.Lock()

    def work() -> None:
        for _ in range(200):
            assert running.acquire(blocking=False)
            sum(range(2000))  # long enough to be interrupted
            running.release()
            hand_over()

    Turns().run(work, work)


@pytest.mark.parametrize(("name", "failing", "seen"), [("a", 1, "a0 b0"), ("b", 0, "a0"), ("b", 1, "a0 b0 a1")])
def test_when_one_fails_the_other_does_not_go_on(name, failing, seen):
    log: list[str] = []
    turns = Turns()
    pieces = [piece(log, each, 3, failing if each == name else None) for each in "ab"]
    with pytest.raises(ValueError, match=f"{name}{failing}"):
        turns.run(*pieces)
    assert log == seen.split()
    turns.run(piece(log, "a", 1), piece(log, "b", 1))
    assert log[-4:] == ["a0", "b0", "a1", "b1"]


def test_without_a_pair_nothing_happens():
    hand_over()


def test_the_second_piece_has_a_thread_that_was_prepared_once():
    prepared: list[str] = []
    turns = Turns(lambda: prepared.append(threading.current_thread().name))
    seen: list[str] = []
    for _ in range(2):
        turns.run(lambda: None, lambda: seen.append(threading.current_thread().name))
    assert len(prepared) == 1 and seen == prepared * 2
    assert prepared != [threading.current_thread().name]


def test_each_piece_finds_its_own_state_again_and_leaves_none_behind():
    state = ["none"]

    def keep():
        kept = state[0]
        return lambda: state.__setitem__(0, kept)

    def piece(name: str, exchanges: int):
        def work() -> None:
            assert state[0] == "none"
            state[0] = name
            for _ in range(exchanges):
                hand_over()
                assert state[0] == name

        return work

    for of_first, of_second in ((2, 4), (4, 2), (0, 1), (1, 0)):
        Turns(keep=keep).run(piece("a", of_first), piece("b", of_second))
        assert state[0] == "none"
