"""Which GPU EGL draws on (field case B34), and the renderer for other people's scenes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from torchrl_vla.envs.gl import import_mujoco
from torchrl_vla.envs.offscreen import SceneRenderer, egl_number

mujoco = import_mujoco()
SCENE = """
<mujoco>
  <worldbody>
    <light pos="0 0 2"/>
    <camera name="top" pos="0 0 1"/>
    <geom type="sphere" size="0.1" rgba="1 0 0 1" group="0"/>
    <geom type="sphere" size="0.1" pos="0.2 0 0" rgba="0 1 0 1" group="1"/>
    {}
  </worldbody>
</mujoco>"""


@pytest.mark.parametrize(
    ("visible", "numbers", "expected"),
    [
        # one visible GPU, physically the fourth; the driver counts from 0 or names the physical one
        ("3", [0], [0]),
        ("3", [3], [0]),
        # EGL lists all four GPUs in another order, then a software device
        ("3", [1, 0, 3, 2, None], [2]),
        ("2,0", [1, 0, 3, 2, None], [3, 1]),
        # UUIDs name no numbers: the driver's own are positions
        ("GPU-2f1c7c0e", [None, 0], [1]),
        ("GPU-a,GPU-b", [1, 0], [1, 0]),
        # nothing said: CUDA's order, not EGL's
        (None, [1, 0], [1, 0]),
        # a CPU host: one software device
        ("", [None], [0]),
        (None, [None], [0]),
    ],
)
def test_positions_become_egl_numbers(visible, numbers, expected):
    assert [egl_number(i, numbers, visible) for i in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("position", "visible", "numbers", "offered"),
    [(1, "3", [0], 1), (3, "3", [0, 1, 2, 3], 1), (2, None, [0, 1], 2), (-1, None, [0], 1)],
)
def test_a_physical_number_is_no_position(position, visible, numbers, offered):
    with pytest.raises(ValueError, match=rf"render_gpu is {position}, but EGL offers {offered}"):
        egl_number(position, numbers, visible)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MUJOCO_", "PYOPENGL"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=keep | env, capture_output=True, text=True, timeout=120
    )


RENDER = f"""
import logging
import multiprocessing

from torchrl_vla.envs.gl import import_mujoco
from torchrl_vla.envs.offscreen import SceneRenderer, render_on

def picture(gpu):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    render_on(gpu)
    mujoco = import_mujoco()
    model = mujoco.MjModel.from_xml_string({SCENE!r}.format(""))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return SceneRenderer(model, 32).render(data, 0).std() > 5
"""


def test_the_chosen_device_draws_and_is_logged():
    done = run(RENDER + "print(picture(0))", MUJOCO_GL="egl", CUDA_VISIBLE_DEVICES="3")
    assert done.stdout == "True\n", done.stderr
    assert "draws with EGL device 0" in done.stderr


def test_a_device_that_is_not_there_is_named():
    done = run(RENDER + "picture(97)", MUJOCO_GL="egl")
    assert "ValueError: render_gpu is 97, but EGL offers" in done.stderr


def test_without_egl_there_is_one_warning_and_no_crash():
    code = "from torchrl_vla.envs.offscreen import render_on; render_on('spread')"
    done = run(code, MUJOCO_GL="osmesa")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "render_gpu=spread has no effect: the OpenGL backend is osmesa"
    ]


def test_words_that_mean_nothing_are_refused():
    from torchrl_vla.envs.offscreen import render_on

    with pytest.raises(ValueError, match="render_gpu is 'all'"):
        render_on("all")


@pytest.fixture
def build():
    made = []

    def make(extra: str = "", **settings: object):
        model = mujoco.MjModel.from_xml_string(SCENE.format(extra))
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        made.append(SceneRenderer(model, 32, **settings))
        return made[-1].render(data, 0).astype(int)

    yield make
    for renderer in made:
        renderer.close()


def test_hidden_groups_are_not_drawn(build):
    both, hidden = build(), build(hidden_groups=[0])
    reds = [(image[..., 0] - image[..., 1] > 50).sum() for image in (both, hidden)]
    greens = [(image[..., 1] - image[..., 0] > 50).sum() for image in (both, hidden)]
    assert reds[0] > 20
    assert reds[1] == 0
    assert greens[0] == greens[1] > 20


def test_large_scenes_are_drawn_whole(build):
    # 300 black plates behind the spheres and, last of all, a blue one: the base draws 200
    plates = "".join('<geom type="box" size=".01 .01 .01" pos="0 0 -5"/>' for _ in range(300))
    image = build(plates + '<geom type="sphere" size="0.1" pos="-0.2 0 0" rgba="0 0 1 1"/>')
    assert (image[..., 2] - image[..., 0] > 50).sum() > 20
    assert np.ptp(image) > 50
