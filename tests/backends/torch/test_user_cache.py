"""The user's cache folder: where it is, and whether processes can share it."""

import fcntl
from pathlib import Path
from unittest import mock

import pytest

from tensorrt_llm_ext.backends.torch.user_cache import cache_folder, can_be_shared


@pytest.mark.parametrize(("variable", "folder"), [("/elsewhere", "/elsewhere"), ("", "/home/one/.cache"), (None, "/home/one/.cache")])
def test_it_lies_where_caches_lie(monkeypatch, variable, folder):
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_folder() == Path(folder, "tensorrt_llm_ext")


def test_a_folder_is_shared_where_a_lock_can_be_held_in_it(tmp_path, monkeypatch):
    assert can_be_shared(tmp_path / "new" / "folder") and not any((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    assert not can_be_shared(tmp_path / "file" / "folder")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError("no locks available")))
    assert not can_be_shared(tmp_path / "new" / "folder")
