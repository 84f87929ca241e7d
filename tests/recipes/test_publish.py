"""An engine directory appears whole or not at all."""

import os
import subprocess
import sys

import pytest

from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.recipes import published

HOLD_A_BUILD = """
import sys, time
from pathlib import Path
from tensorrt_llm_ext.recipes import published
with published(Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_text("half")
    print("building", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def build_elsewhere(tmp_path):
    """A build of tmp_path/engine in another process, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", HOLD_A_BUILD, str(tmp_path / "engine")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"building\n"
    yield process
    process.kill()
    process.wait()


def test_what_was_built_appears_under_its_name(tmp_path):
    out = tmp_path / "deep" / "engine"
    with published(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["engine"] and (out / "a").read_text() == "1"
    assert out.stat().st_mode & 0o777 == 0o755


def test_everything_is_on_the_disk_before_it_has_its_name_and_then_its_name(tmp_path, monkeypatch):
    synced, out = [], tmp_path / "engine"

    def fsync(descriptor):
        synced.append((out.exists(), os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", fsync)
    with published(out) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "a").write_text("1")
        (folder / "b").write_text("2")
        expected = {str(path) for path in (folder, folder / "part", folder / "part" / "a", folder / "b")}
    assert {path for is_named, path in synced if not is_named} == expected
    assert [path for is_named, path in synced if is_named] == [str(tmp_path)]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "engine").mkdir()
    with published(tmp_path / "engine") as folder:
        (folder / "a").touch()
    assert (tmp_path / "engine" / "a").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_build_that_fails_leaves_nothing(error, tmp_path):
    with pytest.raises(error), published(tmp_path / "engine") as folder:
        (folder / "a").touch()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_and_untouched(tmp_path):
    out = tmp_path / "engine"
    out.mkdir()
    for name in "abcdefg":
        (out / name).touch()
    with pytest.raises(BuildError, match="exists already") as error, published(out):
        pytest.fail("the block must not run")
    assert error.value.found == "a folder that holds a, b, c, d, e and 2 more"
    assert len(list(out.iterdir())) == 7 and list(tmp_path.iterdir()) == [out]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "engine").touch()
    with pytest.raises(BuildError) as error, published(tmp_path / "engine"):
        pass
    assert error.value.found == "a file"


def test_a_folder_that_filled_up_meanwhile_is_refused(tmp_path):
    with pytest.raises(BuildError, match="exists already"), published(tmp_path / "engine"):
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "theirs").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_in_progress_is_not_disturbed(tmp_path, build_elsewhere):
    with pytest.raises(BuildError, match="being built by another process"), published(tmp_path / "engine"):
        pytest.fail("the block must not run")
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_crash_left_is_removed_by_the_next_build(tmp_path, build_elsewhere):
    build_elsewhere.kill()
    build_elsewhere.wait()
    assert [path.name.startswith(".engine.building-") for path in tmp_path.iterdir()] == [True]
    with published(tmp_path / "engine") as folder:
        (folder / "a").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_another_engine_s_leftovers_are_not_touched(tmp_path):
    (tmp_path / ".engine2.building-x").mkdir()
    with published(tmp_path / "engine"):
        pass
    assert (tmp_path / ".engine2.building-x").exists()
