"""Times and memory as people and SLURM write them."""

import pytest

from ppctl.config.quantities import memory_bytes, seconds, slurm_seconds


@pytest.mark.parametrize(
    ("text", "found"), [("11h50m", 42600), ("90s", 90), ("1d", 86400), ("1d2h3m4s", 93784), (" 5m ", 300)]
)
def test_a_length_of_time_is_read(text, found):
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "5", "5x", "h", "0s", "5m1h", "-5m", "1.5h", "٥m"])
def test_what_is_no_length_of_time_is_told(text):
    with pytest.raises(ValueError, match="11h50m"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("12:00:00", 43200),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:01", 217801),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text, found):
    assert slurm_seconds(text) == found


@pytest.mark.parametrize("text", ["", "soon", "1h", "1:2:3:4", "-3"])
def test_what_is_no_time_limit_is_told(text):
    with pytest.raises(ValueError, match="12:00:00"):
        slurm_seconds(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("1024", 1024), ("1024B", 1024)],
)
def test_amounts_of_memory(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 gib", "-1GiB", "1e3GiB", "80GiB!"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(ValueError, match="80GiB"):
        memory_bytes(text)
