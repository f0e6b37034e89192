"""The gantry stays what the shipped weights were trained on, to the bit."""

import hashlib

import numpy as np
import pytest

from torchrl_vla.envs.gl import OffscreenRenderer, import_mujoco
from torchrl_vla.envs.tabletop import Tabletop
from torchrl_vla.envs.tabletop.scene import build_mjcf
from torchrl_vla.envs.tabletop.tasks import initial_state

mujoco = import_mujoco()
SCENES = {
    False: "9a6d3e8bec5b2038f4dde9b95088961a79ad5a63526ef0b2e87f9582c856c31d",
    True: "f3c49aa7e62c4b3421d909438624ae5afc85cb91ea83ce96d2301f55877134ce",
}
"""SHA-256 of the scene's text without and with the second camera."""
LOW, HIGH = np.array([-0.20, -0.14, 0.012]), np.array([0.20, 0.14, 0.20])


@pytest.mark.parametrize("second_camera", [False, True])
def test_the_scene_is_unchanged(second_camera: bool):
    text = build_mjcf(second_camera)
    assert hashlib.sha256(text.encode()).hexdigest() == SCENES[second_camera]
    assert build_mjcf(second_camera, "gantry") == text
    assert build_mjcf(second_camera, "arm") != text


class Reference:
    """The gantry written down once more, in plain MuJoCo calls."""

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_string(build_mjcf())
        self.data = mujoco.MjData(self.model)
        self.renderer = OffscreenRenderer(self.model, 64)

    def reset(self, init_state_id: int) -> None:
        initial, data = initial_state(init_state_id), self.data
        mujoco.mj_resetData(self.model, data)
        data.qpos[:5] = data.ctrl[:5] = [0.0, 0.0, 0.15, 0.018, 0.018]
        blocks = data.qpos[5:].reshape(3, 7)
        blocks[:, :3] = initial.positions
        blocks[:, 3:] = 0.0
        blocks[:, 3], blocks[:, 6] = np.cos(0.5 * initial.yaw), np.sin(0.5 * initial.yaw)
        mujoco.mj_forward(self.model, data)
        data.qacc_warmstart[:] = 0.0

    def step(self, action: np.ndarray) -> None:
        data, action = self.data, action.astype(np.float64)
        data.ctrl[:3] = np.clip(data.ctrl[:3] + 0.02 * action[:3], LOW, HIGH)
        data.ctrl[3:] = 0.5 * (action[3] + 1.0) * 0.036
        mujoco.mj_step(self.model, data, nstep=10)

    def render(self) -> np.ndarray:
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        return self.renderer.render(self.data, 0).transpose(2, 0, 1)


def test_states_and_frames_are_bit_identical_to_the_reference():
    sims, reference = Tabletop(2), Reference()
    steps = 0
    for init_state_id in range(12):
        sims.reset(1, init_state_id)
        reference.reset(init_state_id)
        rng = np.random.default_rng(init_state_id)
        for step in range(48):
            expert = sims.expert_action(1) if init_state_id % 2 else 0.0
            action = np.clip(expert + rng.normal(0, 0.5, 4), -1, 1).astype(np.float32)
            outcome = sims.step(1, action)
            reference.step(action)
            qpos = reference.data.qpos
            assert np.array_equal(sims._data[1].qpos, qpos)
            wanted = np.append(qpos[:5], (step + 1) / 48).astype(np.float32)
            assert np.array_equal(sims.state(1), wanted)
            if step % 8 == 0:
                assert np.array_equal(sims.render(1)[0], reference.render())
            steps += 1
            if outcome.terminated:
                break
    assert steps > 150
    reference.renderer.close()
    sims.close()
