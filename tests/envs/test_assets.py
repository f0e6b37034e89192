"""Hashes of scenes: the same files give the same hash, anything else another."""

import pytest

from torchrl_vla.envs.assets import hash_files, hash_folder
from torchrl_vla.envs.gl import renderer_name
from torchrl_vla.envs.tabletop import TabletopSuite


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "a.stl").write_bytes(b"one")
    (tmp_path / "scene.xml").write_text("<mujoco/>")
    return tmp_path


def test_names_and_contents_count_and_the_order_does_not(folder):
    before = hash_folder(folder)
    paths = [folder / "scene.xml", folder / "meshes" / "a.stl"]
    assert hash_files(paths, folder) == hash_files(paths[::-1], folder) == before
    (folder / "scene.xml").write_text("<mujoco />")
    changed = hash_folder(folder)
    (folder / "scene.xml").rename(folder / "other.xml")
    assert len({before, changed, hash_folder(folder)}) == 3


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no file"):
        hash_folder(tmp_path)


def test_scenes_of_our_suite():
    gantry, arm = TabletopSuite(), TabletopSuite(embodiment="arm")
    assert gantry.assets_sha256() == TabletopSuite(image_size=128).assets_sha256()
    assert gantry.assets_sha256() != arm.assets_sha256()


def test_the_renderer_has_a_name_and_a_version():
    renderer, version = renderer_name().split("; ")
    assert renderer
    assert version[0].isdigit()
