"""Whether a host can be connected to, told by plain sockets; and what gloo's failures mean."""

import socket

import pytest

from ppctl.reach.hosts import listen, own_address, reason_of, unreached

BY_GLOO = "[/build/gloo/transport/tcp/pair.cc:"
MESH = "Gloo connectFullMesh failed with"
CLOSED, REFUSED = "the other end closed the connection", "the connection was refused (10.9.0.2 port 50)"


def test_who_listens_is_reached() -> None:
    server, address = listen()
    with server:
        assert unreached({1: address, 2: address}, 10.0) == {}


def test_a_refusal_is_told_at_once_with_what_an_address_of_one_machine_means() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        found = unreached({3: unheard.getsockname()}, 60.0)
    assert found == {3: "the connection was refused (127.0.0.1 is an address that only its own machine can use)"}


def test_silence_is_told_when_the_time_is_over() -> None:
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for taken in (first, second):  # the queue is full, and the kernel drops what comes then
            taken.setblocking(False)
            taken.connect_ex(deaf.getsockname())
        server, address = listen()
        with server:
            found = unreached({0: address, 7: deaf.getsockname()}, 0.3)
    assert list(found) == [7] and found[7].startswith("nothing answered for 0.3 s")


def test_the_address_is_that_of_the_interface_that_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (f"{BY_GLOO}553] Connection closed by peer [10.9.0.3]:29902. This", f"{CLOSED} (10.9.0.3 port 29902)"),
        (
            f"{BY_GLOO}537] Read error [10.9.0.3]:48360: Connection reset by peer. This",
            f"{CLOSED} (10.9.0.3 port 48360)",
        ),
        (f"{MESH} {BY_GLOO}152] timed out connecting: SO_ERROR: Connection refused, remote=[10.9.0.2]:50$2", REFUSED),
        ("[enforce fail at socket.cc:142] rv != -1. -1 vs -1. connect: No route to host", "there is no route to it"),
        (f"{MESH} [pair.h:311] Connect timeout [none]", "nothing answered in time"),
        ("something else\nin two lines", "something else"),
    ],
)
def test_what_gloo_says_is_told_in_our_words(text: str, meaning: str) -> None:
    assert reason_of(RuntimeError(text)) == meaning
