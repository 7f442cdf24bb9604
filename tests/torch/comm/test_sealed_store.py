"""What stands in the store is believed only if a rank of the same start wrote it, under the same key."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, TrainingError
from ppctl.plan import build_plan
from ppctl.rank.rendezvous import SharedRun, publish_run, receive_run, refuse_run, sealed
from ppctl.reach.store import SealedStore, connect
from ppctl.runs.run_starts import SECRET, secret_of, write_secret
from ppctl.runs.rundir import RunDir

OURS, OTHER = bytes(32), bytes(31) + b"\1"
VALUES = [None, 0, -1.5e-300, "", "a\nb\x00\u00e9\ud800", [1, [2, {"a": None}]], {"host": "n1", "address": ["::1", 2]}]


@pytest.mark.parametrize("secret", [OURS, None])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_ranks_of_one_start_read_what_they_wrote(secret, value):
    plain = HashStore()
    SealedStore(plain, secret, "1").set("key", value)
    assert SealedStore(plain, secret, "1").get("key") == value


@pytest.mark.parametrize(
    "forged",
    [
        lambda plain, text: plain.set("key", "anything"),
        lambda plain, text: plain.set("key", ""),
        lambda plain, text: plain.set("key", b"\xff\xfe" * 200),
        lambda plain, text: plain.set("key", "-" * 64 + '"mine"'),
        lambda plain, text: plain.set("key", text[:64] + '"mine"'),
        lambda plain, text: plain.set("key", text[1:]),
        lambda plain, text: SealedStore(plain, OTHER, "1").set("key", "mine"),
        lambda plain, text: SealedStore(plain, OURS, "2").set("key", "of the start after this one"),
        lambda plain, text: plain.set("key", plain.get("another key").decode()),
    ],
)
def test_a_value_of_anybody_else_is_refused(forged):
    plain = HashStore()
    ours = SealedStore(plain, OURS, "1")
    ours.set("key", "ours")
    ours.set("another key", "ours")
    forged(plain, plain.get("key").decode())
    with pytest.raises(TrainingError, match="PP-E776: the value of 'key'"):
        ours.get("key")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, '{"directory": 1}', '{"directory": "a\\u0000b"}', '{"directory": "/etc"}'],
)
def test_a_run_that_a_stranger_publishes_is_refused_whatever_it_says(text, monkeypatch):
    monkeypatch.setenv("PPCTL_START", "1")
    monkeypatch.delenv(SECRET, raising=False)
    plain = HashStore()
    plain.set("ppctl/run", "-" * 64 + text)
    with pytest.raises((TrainingError, ConfigError), match=r"PP-E77[67]"):
        receive_run(plain)


def test_a_run_of_another_directory_whose_secret_the_stranger_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PPCTL_START", "1")
    monkeypatch.delenv(SECRET, raising=False)
    write_secret(RunDir(tmp_path))
    plain = HashStore()
    plain.set("ppctl/run", "0" * 64 + json.dumps({"directory": str(tmp_path), "config": {}, "plan": {}}))
    with pytest.raises(TrainingError, match="PP-E776"):
        receive_run(plain)


def test_the_directory_of_a_run_is_the_proved_one_whatever_stood_there_when_the_secret_was_looked_for(
    tmp_path, monkeypatch
):
    """A link of the stranger's leads to the secret, and the value that rank 0 wrote is put back in time."""
    monkeypatch.setenv("PPCTL_START", "1")
    monkeypatch.delenv(SECRET, raising=False)
    run, link = RunDir(tmp_path / "run"), tmp_path / "link"
    run.path.mkdir()
    link.symlink_to(run.path)
    write_secret(run)
    config = RunConfig()
    plain = HashStore()
    publish_run(sealed(plain, run), SharedRun(run, config, build_plan(config)))
    ours = plain.get("ppctl/run")
    told = [b"-" * 64 + json.dumps({"directory": str(link)}).encode(), ours]

    class Changing:
        """A store whose value another user replaces between two readings."""

        def get(self, key):
            return told.pop(0)

    shared, _ = receive_run(Changing())
    assert told == [] and shared.run.path == run.path


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "MASTER_PORT", "PPCTL_START"])
def test_what_was_recorded_of_another_start_of_the_same_run_is_refused(name, tmp_path, monkeypatch):
    for each in (SECRET, "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("PPCTL_START", "1")
    run, plain = RunDir(tmp_path), HashStore()
    write_secret(run)
    sealed(plain, run).set("key", "recorded")
    assert sealed(plain, run, reported=True).get("key") == "recorded"
    monkeypatch.setenv(name, "7")
    with pytest.raises(TrainingError, match="PP-E776"):
        sealed(plain, run).get("key")


@pytest.mark.parametrize("code", ["true", '"2"', "1e3", "null", "[]", "-1", "300", "0"])
def test_a_refusal_is_an_exit_code_or_nothing(code):
    plain = HashStore()
    plain.set("ppctl/run", "-" * 64 + f'{{"refused": {code}}}')
    with pytest.raises(TrainingError, match="PP-E776"):
        receive_run(plain)
    refuse_run(plain, 4, 1)
    assert receive_run(plain) == 4


# The secret


def test_each_start_draws_a_secret_that_this_user_alone_reads(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    run, drawn = RunDir(tmp_path), set()
    for _ in range(3):
        write_secret(run)
        assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
        drawn.add(secret_of(run))
    assert len(drawn) == 3 and all(len(secret) == 32 for secret in drawn)


def put_fifo(file: Path) -> None:
    os.mkfifo(file)


def put_link(file: Path) -> None:
    file.with_name("elsewhere").write_text("0" * 64)
    file.symlink_to("elsewhere")


def put_readable(file: Path) -> None:
    file.write_text("0" * 64)
    file.chmod(0o640)


def put_hard_link(file: Path) -> None:
    """A file of this user's, to which a stranger may have made the link: one of whose text the stranger knows."""
    other = file.with_name("elsewhere")
    other.write_text("0" * 64)
    other.chmod(0o600)
    file.hardlink_to(other)


def put_others(file: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to make a file of another user's")
    file.write_text("0" * 64)
    os.chown(file, 65534, 65534)


@pytest.mark.parametrize(
    "put",
    [
        lambda file: None,
        lambda file: file.mkdir(),
        lambda file: file.write_text("0" * 63),
        lambda file: file.write_text("0" * 65),
        lambda file: file.write_text("G" * 64),
        lambda file: file.write_bytes(b"\xff" * 64),
        put_fifo,
        put_link,
        put_readable,
        put_hard_link,
        put_others,
    ],
)
def test_a_file_that_is_no_secret_of_this_users_is_refused_at_once(tmp_path, monkeypatch, put):
    monkeypatch.delenv(SECRET, raising=False)
    put(tmp_path / "secret")
    with pytest.raises(ConfigError, match="PP-E777"):
        secret_of(RunDir(tmp_path), reported=True)


def test_ranks_without_a_common_disk_take_the_users_variable_and_none_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "ab" * 32)
    assert secret_of(RunDir(tmp_path)) == bytes.fromhex("ab" * 32)
    monkeypatch.setenv(SECRET, "none")
    assert secret_of(RunDir(tmp_path)) is None
    for wrong in ("", "None", "ab" * 31, "ab" * 33, "AB" * 32):
        monkeypatch.setenv(SECRET, wrong)
        with pytest.raises(ConfigError, match="PP-E777"):
            secret_of(RunDir(tmp_path))


# The port


def listeners(port: int) -> list[str]:
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_rank_0_listens_on_the_address_that_it_is_told_alone(host, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.delenv("PPCTL_NODE_DIRECTORY", raising=False)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = connect(0, 1, timedelta(seconds=20))
    store.set("key", "value")
    assert listeners(port) == [f"0100007F:{port:04X}"] or listeners(port) == [f"{'0' * 24}01000000:{port:04X}"]


def test_a_port_that_rank_0_cannot_have_is_an_error_with_its_address(monkeypatch):
    monkeypatch.delenv("PPCTL_NODE_DIRECTORY", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            monkeypatch.setenv("MASTER_PORT", str(port))
            with pytest.raises(ConfigError, match=f"PP-E605: rank 0 on .* cannot listen at 127.0.0.1 port {port}"):
                connect(0, 2, timedelta(seconds=5))
