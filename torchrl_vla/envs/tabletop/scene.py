"""The tabletop scene as an MJCF string: a table, three coloured cubes and a gripper that is carried
by a gantry or by a seven-joint arm.

Every geometry is a primitive, so the scene needs no asset files. Coordinates are in metres: the
table top is z = 0, x points to the right of the fixed camera's image and y away from it.

``qpos`` is ``[joints, finger_left, finger_right, 3 x (block xyz, block quaternion)]``. The gripper
body's origin is its tip: the gantry's three joints *are* the tip's position.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

COLOURS = ("red", "green", "blue")
"""Block colours in the order of their bodies in the model."""
IMAGE_SIZES = (64, 96, 128, 224)
"""Supported image heights and widths [px]."""
CAMERA_NAMES = ("front", "wrist")
"""Camera names in model order; the second is optional."""

TIMESTEP = 0.005
"""Physics time step [s]."""
SUBSTEPS = 10
"""Physics steps per control step."""
CONTROL_HZ = 1.0 / (TIMESTEP * SUBSTEPS)
"""Control steps per simulated second (20)."""

BLOCK_HALF = 0.02
"""Half the edge of a cube [m]; also the height of a resting cube's centre."""
FINGER_OPEN = 0.036
"""Finger slide position when fully open [m]; 0 is closed."""
WORKSPACE_LOW = np.array([-0.20, -0.14, 0.012])
"""Lower corner of the tip's workspace [m]."""
WORKSPACE_HIGH = np.array([0.20, 0.14, 0.20])
"""Upper corner of the tip's workspace [m]."""
HOME = np.array([0.0, 0.0, 0.15])
"""Tip position at the start of an episode [m]."""

N_GRIPPER_QPOS = 5
"""Leading ``qpos`` entries (and all ``ctrl`` entries) that belong to the gripper."""

_RGBA = {"red": "0.9 0.1 0.1 1", "green": "0.1 0.75 0.15 1", "blue": "0.12 0.25 0.95 1"}
_CAMERA_POS = (0.0, -0.36, 0.44)
_CAMERA_LOOKAT = (0.0, 0.02, 0.02)
_LINK_CLASS = """
    <default class="link">
      <geom type="box" contype="0" conaffinity="0" rgba="0.85 0.86 0.88 1"/>
    </default>"""
_WRIST_CAMERA = '<camera name="wrist" pos="0 -0.06 0.09" fovy="70" xyaxes="1 0 0 0 0.94 0.342"/>'
_ARM_BASE_Y, _SHOULDER, _UPPER, _FORE, _HAND = 0.48, 0.30, 0.40, 0.40, 0.24
_LINKS = (
    # axis, range [deg], height above the last joint [m], mass [kg], half sizes, centre [m]
    ("0 0 1", (-166, 166), _SHOULDER, 1.0, "0.055 0.055 0.05", 0.0),
    ("0 1 0", (-126, 126), 0.0, 0.6, "0.04 0.05 0.08", 0.08),
    ("0 0 1", (-166, 166), 0.0, 0.6, "0.045 0.04 0.13", 0.25),
    ("0 1 0", (-160, 160), _UPPER, 0.5, "0.035 0.045 0.09", 0.07),
    ("0 0 1", (-166, 166), 0.0, 0.4, "0.035 0.035 0.11", 0.26),
    ("0 1 0", (-160, 160), _FORE, 0.3, "0.025 0.035 0.035", 0.0),
    ("0 0 1", (-172, 172), 0.0, 0.2, "0.02 0.02 0.025", 0.055),
)
N_ARM_JOINTS = len(_LINKS)
"""Leading ``qpos`` and ``ctrl`` entries that are the arm's joints; two fingers follow."""


def _arm_home() -> np.ndarray:
    """Solve the triangle of shoulder, elbow and wrist for a hand that points down at HOME."""
    across, up = _ARM_BASE_Y - HOME[1], HOME[2] + _HAND - _SHOULDER
    cosine = (across**2 + up**2 - _UPPER**2 - _FORE**2) / (2 * _UPPER * _FORE)
    elbow = math.acos(cosine)
    inner = math.atan2(_FORE * math.sin(elbow), _UPPER + _FORE * math.cos(elbow))
    shoulder = 0.5 * math.pi - math.atan2(up, across) - inner
    return np.array([0, shoulder, 0, elbow, 0, math.pi - shoulder - elbow, 0.5 * math.pi])


ARM_HOME = _arm_home()
"""Joint angles that put the tip at :data:`HOME`, pointing straight down [rad], ``[7]``."""


def _look_at(position: tuple[float, ...], target: tuple[float, ...]) -> str:
    """``xyaxes`` of a camera at ``position`` looking at ``target``, world z up."""
    back = np.subtract(position, target)
    back /= math.sqrt(float(back @ back))
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= math.sqrt(float(right @ right))
    return " ".join(f"{v:.6f}" for v in (*right, *np.cross(back, right)))


def _gripper(second_camera: bool) -> str:
    """The gripper body: three gantry slides, two fingers and a palm too slim to hide the blocks."""
    return f"""
    <body name="gripper" gravcomp="1">
      <joint name="gantry_x" type="slide" axis="1 0 0"/>
      <joint name="gantry_y" type="slide" axis="0 1 0"/>
      <joint name="gantry_z" type="slide" axis="0 0 1"/>
      <geom class="gripper" type="box" size="0.045 0.004 0.003" pos="0 0 0.050" mass="0.25"/>
      <geom class="gripper" type="box" size="0.0025 0.0025 0.16" pos="0 0 0.213" mass="0.05"/>
      {_WRIST_CAMERA if second_camera else ""}{_fingers()}
    </body>"""


def _fingers() -> str:
    """Two fingers that slide apart along x."""
    return "".join(
        f"""
      <body name="finger_{side}" pos="{sign * 0.006} 0 0" gravcomp="1">
        <joint name="finger_{side}" type="slide" axis="{sign} 0 0" range="0 {FINGER_OPEN}"
          limited="true"/>
        <geom class="gripper" type="box" size="0.006 0.011 0.027" pos="0 0 0.02" mass="0.05"
          friction="1.5 0.01 0.0001" rgba="0.95 0.80 0.15 1"/>
      </body>"""
        for side, sign in (("left", -1), ("right", 1))
    )


def _arm(second_camera: bool) -> str:
    """Seven links from a pedestal behind the table; shoulder and wrist turn about one point each.

    All joint angles 0: the arm points straight up. Only the fingers and the palm touch things.
    """
    half = _SHOULDER / 2 - 0.03
    out = f"""
    <body name="pedestal" pos="0 {_ARM_BASE_Y} 0" euler="0 0 -90" gravcomp="1">
      <geom class="link" size="0.07 0.07 {half}" pos="0 0 {half}"/>"""
    for number, (axis, (low, high), height, mass, size, centre) in enumerate(_LINKS, start=1):
        out += f"""
      <body name="link_{number}" pos="0 0 {height}" gravcomp="1">
        <joint name="joint_{number}" axis="{axis}" range="{low} {high}" armature="0.03"/>
        <geom class="link" size="{size}" pos="0 0 {centre}" mass="{mass}"/>"""
    out += f"""
      <body name="gripper" pos="0 0 {_HAND}" quat="0 1 0 0" gravcomp="1">
        <site name="tip" group="4"/>
        <geom class="gripper" type="box" size="0.045 0.004 0.003" pos="0 0 0.050" mass="0.25"/>
        <geom class="gripper" type="box" size="0.0025 0.0025 0.05" pos="0 0 0.103" mass="0.05"/>
        {_WRIST_CAMERA if second_camera else ""}{_fingers()}
      </body>"""
    return out + "</body>" * (len(_LINKS) + 1)


def _blocks() -> str:
    """The three cubes, parked at the origin until a reset places them."""
    return "".join(
        f"""
    <body name="{colour}" pos="0 0 {BLOCK_HALF}">
      <freejoint name="{colour}"/>
      <geom name="{colour}" class="block" rgba="{_RGBA[colour]}"/>
    </body>"""
        for colour in COLOURS
    )


def build_mjcf(second_camera: bool = False, embodiment: Literal["gantry", "arm"] = "gantry") -> str:
    """Return the scene as MJCF text, valid for mujoco >= 3.3, < 5.

    Args:
        second_camera: Add camera ``"wrist"``, mounted on the gripper and looking down.
        embodiment: What carries the gripper.
    """
    if embodiment == "arm":
        robot, carrier = _arm(second_camera), [f"joint_{i + 1}" for i in range(N_ARM_JOINTS)]
        link = _LINK_CLASS
    else:
        robot, carrier = _gripper(second_camera), ["gantry_x", "gantry_y", "gantry_z"]
        link = ""
    joints = (*carrier, "finger_left", "finger_right")
    actuators = "".join(f'<position joint="{j}" kp="600" kv="40"/>' for j in joints)
    position = " ".join(str(v) for v in _CAMERA_POS)
    return f"""
<mujoco model="tabletop">
  <compiler autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="3">
    <flag autoreset="disable"/>
  </option>
  <visual>
    <headlight ambient="0.35 0.35 0.35" diffuse="0.35 0.35 0.35" specular="0 0 0"/>
    <map znear="0.02" zfar="20"/>
  </visual>
  <statistic center="0 0 0" extent="1"/>
  <default>
    <default class="block">
      <geom type="box" size="{BLOCK_HALF} {BLOCK_HALF} {BLOCK_HALF}" mass="0.05"
        friction="0.8 0.01 0.0001" contype="1" conaffinity="3"/>
    </default>
    <default class="gripper">
      <geom contype="2" conaffinity="0" rgba="0.22 0.22 0.25 1"/>
    </default>{link}
  </default>
  <worldbody>
    <light pos="-0.25 -0.3 1.1" dir="0.22 0.26 -1" diffuse="0.5 0.5 0.5" specular="0 0 0"/>
    <camera name="front" pos="{position}" fovy="38"
      xyaxes="{_look_at(_CAMERA_POS, _CAMERA_LOOKAT)}"/>
    <geom name="table" type="plane" size="1 1 0.1" group="4" contype="1" conaffinity="0"/>
    <geom name="table_top" type="box" size="0.5 0.5 0.01" pos="0 0.25 -0.01" contype="0"
      conaffinity="0" rgba="0.78 0.74 0.68 1"/>{robot}{_blocks()}
  </worldbody>
  <actuator>{actuators}</actuator>
</mujoco>"""
