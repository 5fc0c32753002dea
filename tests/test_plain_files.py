"""Paths that somebody wrote and no file can have: refused wherever a path is read, by one error."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from roundpipe_cli.cli.convert import convert
from roundpipe_cli.cli.export import find_adapter_base
from roundpipe_cli.cli.recipes import write_new
from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import count_dataset, find_sources
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import write_named
from roundpipe_cli.hub.download import commit_in
from roundpipe_cli.model.files.source import resolve_model
from roundpipe_cli.recipe.load import load_recipe, resolve_path
from roundpipe_cli.regular_files import read_json_of_ours
from tests.data.test_data_dataset import byte_tokenizer

HERE = Path(__file__).parent


def _find_base(name: str, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    find_adapter_base(folder, None, offline=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda name, folder: resolve_model(name, revision=None, recipe_folder=folder, offline=True),
        lambda name, folder: resolve_model(name, revision=None, recipe_folder=folder, offline=True, weights=False),
        lambda name, folder: find_config(name, resolve_path(name, folder)),
        lambda name, folder: find_sources(DatasetSpec(name), folder, offline=True),
        lambda name, folder: find_template(byte_tokenizer(), name, folder),
        lambda name, _: load_recipe(name, []),
        _find_base,
    ],
    ids=["model", "model name", "plan", "dataset", "template", "recipe", "adapter"],
)
@pytest.mark.parametrize(
    "name", ["x" * 300, "a/" + "x" * 300, "~nobody-has-this-name/x", "/".join(["y" * 200] * 30), "a\0b"], ids=repr
)
def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, read: Callable[..., object], name: str) -> None:
    """Story: each was "a bug of roundpipe": `File name too long`, `Could not determine home directory`."""
    with pytest.raises(RefusedError) as caught:
        read(name, tmp_path)
    assert len(str(caught.value)) < 9000


def odd_file(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "terabyte":
            path.touch()
            os.truncate(path, 2**40)
        case "deep":
            path.write_text("[" * 100_000)
        case _:
            path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("kind", ["pipe", "zeros", "terabyte", "deep", "bytes"])
@pytest.mark.parametrize(
    "read",
    [load_costs, convert, lambda path: find_template(byte_tokenizer(), str(path), None)],
    ids=["costs", "convert", "template"],
)
def test_what_is_no_text_of_a_few_pages_is_refused(tmp_path: Path, read: Callable[[Path], object], kind: str) -> None:
    """Story: `bench --costs` and `convert` waited for a pipe for ever; a device, or a terabyte, took all memory."""
    odd_file(tmp_path / "file", kind)
    with pytest.raises(RefusedError, match="file|too large"):
        read(tmp_path / "file")


@pytest.mark.parametrize("kind", ["pipe", "zeros", "terabyte", "deep", "bytes"])
def test_odd_files_in_caches_count_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Story: a commit in the hub's cache that was no UTF-8, and a proof nested too deep, were bugs of roundpipe."""
    odd_file(tmp_path / "file", kind)
    assert commit_in(tmp_path / "file") is None
    with pytest.raises(ValueError):
        read_json_of_ours(tmp_path / "file")
    infos = tmp_path / "datasets" / "me___rows" / "default" / "0.0.0" / "abc"
    infos.mkdir(parents=True)
    odd_file(infos / "dataset_info.json", kind)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert count_dataset(DatasetSpec("me/rows"), None) is None


def test_a_commit_in_the_cache_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("../../../somewhere")
    assert commit_in(tmp_path / "ref") is None
    (tmp_path / "ref").write_text("0123abc\n")
    assert commit_in(tmp_path / "ref") == "0123abc"


def test_a_page_goes_into_pipes_and_devices_and_through_links(tmp_path: Path) -> None:
    """Story: `watch --html /dev/null` by root put a file in the place of /dev/null, and a link was replaced."""
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_named(tmp_path / "pipe", "page")
    reader.join(10)
    assert found == ["page"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_named(tmp_path / "link", "page")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "page"
    if os.geteuid() == 0:
        os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        write_named(tmp_path / "null", "page")
        assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("name", [".", "file/page.html", "no/page.html"])
def test_a_page_needs_a_folder_that_is_there(tmp_path: Path, name: str) -> None:
    """Story: a file in the place of the folder was a bug of roundpipe, and a folder a failing disk."""
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="cannot write"):
        write_named(tmp_path / name, "page")
    with pytest.raises(RefusedError, match=r"is a folder|cannot be written") as caught:
        write_new(tmp_path / name.replace("no/", "file/"), b"recipe")
    assert caught.value.exit_code == 2 and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_recipe_named_like_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `convert -o .` was a bug of roundpipe."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError, match="is a folder"):
        write_new(Path(), b"recipe")
