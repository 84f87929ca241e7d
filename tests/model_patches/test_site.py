"""Finding upstream and its version without importing it."""

import sys

import pytest
from packaging.version import Version
from upstream_source import write_upstream

import model_patches
from model_patches import find_site
from tensorrt_llm_ext.errors import PatchError


def test_a_folder_without_upstream_is_a_clear_error(tmp_path):
    with pytest.raises(PatchError, match="not installed here") as error:
        find_site(tmp_path)
    assert str(tmp_path) in error.value.found and "--site" in error.value.fix
    if "tensorrt_llm" not in sys.modules:
        with pytest.raises(PatchError, match="not installed here"):
            find_site()


def test_an_installed_upstream_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_upstream(tmp_path, "1.2.1"))
    assert model_patches.find_site() == model_patches.Site(tmp_path, Version("1.2.1"))


def test_the_last_assignment_of_the_version_counts(tmp_path):
    path = write_upstream(tmp_path, "0.16.0") / "tensorrt_llm" / "version.py"
    path.write_text('__version__ = "unknown"\n' + path.read_text())
    assert find_site(tmp_path).version == Version("0.16.0")


@pytest.mark.parametrize("version", ["0.12.0", "1.3.0rc20", "1.4.0"])
def test_a_version_that_the_patch_does_not_serve_is_refused(tmp_path, version):
    with pytest.raises(PatchError, match="not a version that the patch serves") as error:
        find_site(write_upstream(tmp_path, version))
    assert error.value.found == version


@pytest.mark.parametrize("text", ["", "__version__ = read()", "__version__ = 'one'", "def", "__version__ = 1"])
def test_a_version_that_cannot_be_read_is_refused(tmp_path, text):
    (write_upstream(tmp_path, "0.16.0") / "tensorrt_llm" / "version.py").write_text(text)
    with pytest.raises(PatchError, match="version of TensorRT-LLM cannot be read"):
        find_site(tmp_path)
