"""The golden numbers of tests/golden/openvla and models built on them."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from torchrl_vla.policies.action_tokens import ActionWindow
from torchrl_vla.policies.openvla.backbone import OpenVLA
from torchrl_vla.policies.openvla.towers import dinov2_sizes, siglip_sizes

GOLDEN = Path(__file__).parent.parent / "golden" / "openvla"
EMBEDDING = "language_model.model.embed_tokens.weight"
ATOL = 2e-5
NUMBER = 56
"""8 chunk steps of 7 numbers."""
WINDOW = ActionWindow(32000)
TOWERS = (
    dinov2_sizes(56, width=32, depth=3, num_heads=2),
    siglip_sizes(56, width=48, depth=4, num_heads=3),
)


@cache
def arrays(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def case(name: str) -> dict[str, torch.Tensor]:
    """Return the arrays of one case of cases.safetensors."""
    return part("cases", name)


def part(file: str, prefix: str) -> dict[str, torch.Tensor]:
    found = {k.split("/", 1)[1]: v for k, v in arrays(file).items() if k.startswith(f"{prefix}/")}
    assert found, f"{file} has nothing under {prefix}"
    return found


def config(name: str = "fused") -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def language() -> dict:
    return {k: v for k, v in config()["text_config"].items() if k != "model_type"}


def state_dict(name: str = "fused") -> dict[str, torch.Tensor]:
    """Return the reference weights in float32; embeddings that no case reads are zero."""
    stored = {key: value.float() for key, value in part("weights", "fused").items()}
    table = torch.zeros(32064, 24)
    table[arrays("weights")["embedded_ids"]] = stored[EMBEDDING]
    stored[EMBEDDING] = table
    if name == "single":
        own = {k: v for k, v in stored.items() if k.startswith("language_model.")}
        stored = own | {k: v.float() for k, v in part("weights", "single").items()}
    return stored


def model(name: str = "fused", attention: str = "bidirectional") -> OpenVLA:
    towers = TOWERS if name == "fused" else TOWERS[1:]
    built = OpenVLA(towers, language(), WINDOW, attention)
    built.load_state_dict(state_dict(name))
    return built.eval()


def inputs() -> dict[str, torch.Tensor]:
    return arrays("inputs")


def pixels(name: str = "fused") -> torch.Tensor:
    """Return the two rows' pixels ``[2, 1, C, 56, 56]``."""
    given = inputs()
    return given["pixel_values" if name == "fused" else "pixel_values_single"][:, None]
