"""What a policy says about itself, and that a resume compares it."""

from pathlib import Path

import pytest
import torch
from openvla_folder import META as ARM
from openvla_folder import write_folder
from small_checkpoints import META

from torchrl_vla.policies import openvla, pi0, tiny, vlm
from torchrl_vla.policies.description import check_description, describe

SOURCE = Path("checkpoints/step-000000007")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    write_folder(tmp_path)
    return tmp_path


FAMILIES = {
    "tiny": lambda: tiny.make_policy(META, weights=None),
    "openvla_oft": lambda: openvla.make_policy(META, size="tiny", width=32),
    "pi0": lambda: pi0.make_policy(META, size="tiny"),
    "vlm": lambda: vlm.make_policy(META, size="tiny"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_describes_itself_in_plain_values(family: str):
    torch.manual_seed(0)
    facts = describe(FAMILIES[family]())
    assert facts["statistics_sha256"] is None  # random weights have none
    assert facts["precision"] == "float32"
    check_description(facts, facts, SOURCE)


def test_attention_and_statistics_are_compared(published: Path):
    own = describe(openvla.make_policy(ARM, checkpoint=str(published), chunk_size=2))
    assert own["attention"] == "bidirectional"
    assert len(own["statistics_sha256"]) == 16
    causal = openvla.make_policy(ARM, checkpoint=str(published), chunk_size=2, attention="causal")
    with pytest.raises(ValueError, match="attention=bidirectional there and causal here") as caught:
        check_description(own, describe(causal), SOURCE)
    assert "\n" not in str(caught.value)
    assert str(SOURCE) in str(caught.value)
    other = own | {"statistics_sha256": "0" * 16}
    with pytest.raises(ValueError, match=f"statistics_sha256={'0' * 16} there and [0-9a-f]{{16}}"):
        check_description(other, own, SOURCE)


def test_a_moved_checkpoint_is_the_same_policy(published: Path):
    own = describe(openvla.make_policy(ARM, checkpoint=str(published), chunk_size=2))
    check_description(own | {"checkpoint": "elsewhere"}, own, SOURCE)
