"""A lock names what there is; a plugin manager that keeps to it refuses everything else."""

from __future__ import annotations

import msgspec
import pytest

from treadle.api.kinds import QUANTIZATION
from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins import PluginManager


@pytest.fixture
def file(site):
    """A lock of two distributions."""
    site.scheme("acme-awq", "awq")
    site.scheme("acme-fp8", "fp8")
    path = site.folder / "treadle.lock"
    path.write_bytes(msgspec.json.encode(site.plugin_manager().lock()))
    return path


def drift(site, file, **options):
    with pytest.raises(PluginConflictError) as exc_info:
        site.plugin_manager(plugin_lock_file=str(file), **options)
    return str(exc_info.value)


def test_the_same_plugins_pass_and_none_is_imported(site, file):
    plugins = site.plugin_manager(plugin_lock_file=str(file))
    assert plugins.create(QUANTIZATION, "awq", checkpoint={}, device=None).name == "acme-awq"
    assert {e.state for e in plugins.entries if e.key == "fp8"} == {"ready"}


def test_another_version_is_drift(site, file):
    info = site.folder / "acme_awq-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-awq\nVersion: 1.1\n")
    info.rename(site.folder / "acme_awq-1.1.dist-info")
    message = drift(site, file)
    assert "- quantization:awq (v1) from acme-awq 1.0\n" in message
    assert "+ quantization:awq (v1) from acme-awq 1.1\n" in message


def test_one_more_one_less_and_one_disabled_are_drift(site, file):
    site.scheme("acme-new", "new")
    message = drift(site, file, disable_plugin=["acme-fp8"])
    assert "+ quantization:new (v1) from acme-new 1.0\n" in message
    assert "- quantization:fp8 (v1) from acme-fp8 1.0\n" in message
    assert "awq" not in message and f"treadle plugin lock {file}" in message


def test_another_generation_is_drift(site, file):
    file.write_text(file.read_text().replace('"generation":1', '"generation":2', 1))
    message = drift(site, file)
    assert "- quantization:awq (v2)" in message and "+ quantization:awq (v1)" in message


def test_a_changed_local_file_is_drift(site, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text('TREADLE = {"scheduling_policies": ["mine"]}\n')
    lock = tmp_path / "treadle.lock"
    lock.write_bytes(msgspec.json.encode(site.plugin_manager(plugin_file=[str(mine)]).lock()))
    site.plugin_manager(plugin_file=[str(mine)], plugin_lock_file=str(lock))
    mine.write_text('TREADLE = {"scheduling_policies": ["mine"]}\n# changed\n')
    assert "- scheduling_policies:mine" in drift(site, lock, plugin_file=[str(mine)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not a lock file"),
        ('{"version":9,"plugins":[]}', "reads 1"),
    ],
)
def test_what_is_no_lock_is_refused(site, tmp_path, text, words):
    path = tmp_path / "x.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        site.plugin_manager(plugin_lock_file=str(path))


def test_a_worker_is_not_asked_again(site, file):
    """The parent has checked; what it chose travels in the plan."""
    plugins = site.plugin_manager(plugin_lock_file=str(file))
    site.scheme("acme-new", "new")
    worker = PluginManager.from_selection(plugins.selection(), plugins.config, source=site.scan)
    assert worker.create(QUANTIZATION, "awq", checkpoint={}, device=None).name == "acme-awq"
