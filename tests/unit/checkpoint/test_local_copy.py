"""The files of a copy in the host's memory: the end of a run deletes them all, and nothing else."""

from ppctl.checkpoint.local_copy import LocalCopy


def test_the_end_deletes_the_copies_of_ranks_that_an_earlier_start_had(tmp_path):
    directory = tmp_path / "id"
    directory.mkdir()
    for name in ("rank-00000.values", "rank-00000.json", "rank-00003.values", "rank-00003.json", "rank-00003.tmp"):
        (directory / name).touch()
    LocalCopy(directory, 0, 2).remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "rank-00001.values").touch()
    LocalCopy(tmp_path, 0, 1).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
