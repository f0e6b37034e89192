"""Backend and device choice, without and with a driver."""

import os
import subprocess
import sys

import pytest

from torchrl_vla.envs import gl

NO_GL = """
import ctypes, os
os.environ.pop("MUJOCO_GL", None)
real = ctypes.CDLL
def fake(name, *args, **kwargs):
    if name and ("EGL" in name or "OSMesa" in name):
        raise OSError(name)
    return real(name, *args, **kwargs)
ctypes.CDLL = ctypes.cdll._dlltype = fake
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    return subprocess.run(
        [sys.executable, "-c", code], env=keep | env, capture_output=True, text=True, timeout=120
    )


def error_line(done: subprocess.CompletedProcess, start: str) -> str:
    """The one line of the traceback that holds the error (mujoco 3.3 prints more after it)."""
    lines = [s for s in done.stderr.splitlines() if s.startswith(f"RuntimeError: {start}")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_missing_libraries_give_one_line_with_the_apt_command():
    done = run(NO_GL + "from torchrl_vla.envs.gl import choose_backend; choose_backend()")
    assert gl.APT_LINE in error_line(done, "no off-screen OpenGL library found")


def test_physics_works_without_opengl_and_the_first_render_says_what_is_missing():
    code = """
import numpy as np
from torchrl_vla.envs.tabletop import Tabletop
sims = Tabletop(1)
sims.reset(0, 1)
sims.step(0, np.zeros(4, np.float32))
try:
    sims.render(0)
except RuntimeError as error:
    print(error)
"""
    done = run(NO_GL + code)
    assert done.returncode == 0, done.stderr
    assert gl.APT_LINE in done.stdout


def test_rendering_works_where_mujoco_was_imported_before_a_backend_was_chosen():
    code = """
import torchrl_vla.envs.simulator
import mujoco
from torchrl_vla.envs.tabletop import Tabletop
sims = Tabletop(1)
sims.reset(0, 1)
print(sims.render(0).std() > 10)
"""
    done = run(code)
    assert done.stdout == "True\n", done.stderr


def test_osmesa_is_the_second_choice(monkeypatch):
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "LP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(gl, "_loads", lambda library: "OSMesa" in library)
    assert gl.choose_backend() == "osmesa"
    assert os.environ["MUJOCO_GL"] == os.environ["PYOPENGL_PLATFORM"] == "osmesa"
    assert os.environ["LP_NUM_THREADS"] == "0"


def test_egl_without_a_driver_is_not_chosen(monkeypatch, tmp_path):
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "__EGL_VENDOR_LIBRARY_FILENAMES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_DIRS", str(tmp_path))
    monkeypatch.setattr(gl, "_loads", lambda library: library == "libEGL.so.1")
    with pytest.raises(RuntimeError, match="apt-get"):
        gl.choose_backend()
    (tmp_path / "10_broken.json").write_text("{")
    (tmp_path / "50_x.json").write_text('{"ICD": {"library_path": "libEGL_x.so.0"}}')
    monkeypatch.setattr(gl, "_loads", lambda library: "EGL" in library)
    assert gl.choose_backend() == "egl"


def test_a_set_backend_is_respected(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "OSMesa")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    monkeypatch.setattr(gl, "_loads", lambda library: pytest.fail("must not probe"))
    assert gl.choose_backend() == "osmesa"
    assert os.environ["MUJOCO_GL"] == "OSMesa"


@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_a_chosen_backend_that_cannot_start_names_the_apt_line(backend):
    code = """
import numpy as np
from torchrl_vla.envs.tabletop import Tabletop
sims = Tabletop(1)
sims.reset(0, 1)
sims.step(0, np.zeros(4, np.float32))
print("physics works")
sims.render(0)
"""
    faked = NO_GL.replace('os.environ.pop("MUJOCO_GL", None)', "")
    done = run(faked + code, MUJOCO_GL=backend)
    assert done.stdout == "physics works\n"
    assert gl.APT_LINE in error_line(done, f"OpenGL backend '{backend}' cannot start")


def test_egl_without_a_vendor_names_the_apt_line():
    code = """
from torchrl_vla.envs.tabletop import Tabletop
sims = Tabletop(1)
sims.reset(0, 1)
sims.render(0)
"""
    done = run(code, MUJOCO_GL="egl", __EGL_VENDOR_LIBRARY_FILENAMES="/nonexistent.json")
    assert gl.APT_LINE in error_line(done, "OpenGL backend 'egl' cannot start")


@pytest.mark.parametrize(
    ("cuda", "visible", "expected"),
    [
        ("3", 1, [0, 0, 0, 0]),
        ("", 2, [0, 1, 0, 1]),
        (None, 2, [0, 1, 0, 1]),
        ("-1", 2, [0, 1, 0, 1]),
        ("GPU-2f1c7c0e-uuid", 1, [0, 0, 0, 0]),
        ("GPU-a,GPU-b", 2, [0, 1, 0, 1]),
        ("0,1", 2, [0, 1, 0, 1]),
        ("6,7", 2, [0, 1, 0, 1]),
        ("2,3", 4, [0, 1, 0, 1]),
        ("3", 8, [0, 0, 0, 0]),
    ],
)
def test_egl_device_index(monkeypatch, cuda, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if cuda is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda)
    assert [gl.egl_device_index(worker, visible) for worker in range(4)] == expected


def test_egl_device_index_refuses_bad_numbers():
    with pytest.raises(ValueError, match="visible_devices is 0"):
        gl.egl_device_index(0, 0)
    with pytest.raises(ValueError, match="worker is -1"):
        gl.egl_device_index(-1, 1)
