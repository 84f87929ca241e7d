"""``trtllm-extract upstream``: prints the command of a recipe, or runs it where the patch is applied."""

import json
import os
import shlex

import pytest
from click.testing import CliRunner
from upstream_source import write_upstream

import model_patches
from tensorrt_llm_ext.cli import main


def upstream(*options):
    arguments = ["upstream", *options, "--checkpoint", "ckpt", "--out", "engine"]
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment with upstream 0.16 and a trtllm-build that writes down its arguments."""
    site = write_upstream(tmp_path / "site", "0.16.0")
    program = tmp_path / "bin" / "trtllm-build"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho building\nfor word in "$@"; do echo "$word" >> "$0.log"; done\ntest "$6" = disabled\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return site


def ran(site):
    log = site.parent / "bin" / "trtllm-build.log"
    return log.read_text().splitlines() if log.exists() else None


def test_the_command_is_printed_and_nothing_runs():
    result = upstream("1.2", "--gemm-plugin", "fp8", "--print")
    words = shlex.split(result.stdout)
    assert result.exit_code == 0 and words[0] == "trtllm-build"
    assert words[words.index("--gemm_plugin") + 1] == "fp8" and words[words.index("--kv_cache_type") + 1] == "disabled"
    told = json.loads(upstream("1.2", "--gemm-plugin", "fp8", "--print", "--json").stdout)
    assert told == {"command": words, "version": "1.2", "is_run": False}


def test_the_build_runs_where_the_patch_is_applied(site):
    model_patches.apply(model_patches.find_site(site))
    result = upstream("0.16", "--site", site)
    assert result.exit_code == 0, result.output
    assert ["trtllm-build", *ran(site)] == json.loads(upstream("0.16", "--print", "--json").stdout)["command"]
    assert "trtllm-extract adopt engine" in result.stdout and "building" not in result.stdout


def test_a_build_without_the_patch_is_refused_before_it_costs_anything(site):
    result = upstream("0.16", "--site", site)
    assert result.exit_code != 0 and "trtllm-extract patch apply" in result.stderr and ran(site) is None


def test_a_recipe_of_another_version_is_refused(site):
    model_patches.apply(model_patches.find_site(site))
    result = upstream("0.17", "--site", site)
    assert result.exit_code != 0 and "another version" in result.stderr and ran(site) is None


def test_a_failed_build_is_an_error(site):
    model_patches.apply(model_patches.find_site(site))
    program = site.parent / "bin" / "trtllm-build"
    program.write_text("#!/bin/sh\nexit 3\n")
    result = upstream("0.16", "--site", site)
    assert result.exit_code != 0 and "trtllm-build failed" in result.stderr and "exit code 3" in result.stderr


def test_a_missing_builder_is_an_error(site, monkeypatch):
    model_patches.apply(model_patches.find_site(site))
    monkeypatch.setenv("PATH", "")
    result = upstream("0.16", "--site", site)
    assert result.exit_code != 0 and "'trtllm-build' is not on the path" in result.stderr


def test_upstream_not_installed_is_an_error(tmp_path):
    result = upstream("0.16", "--site", tmp_path)
    assert result.exit_code != 0 and "not installed here" in result.stderr
