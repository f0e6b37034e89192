"""Dataset statistics: normalisation, keys, and conversions that happen once."""

import logging
import math

import pytest
import torch

from torchrl_vla.policies.statistics import (
    ActionSpace,
    DatasetActions,
    LiberoGripper,
    Normalizer,
    SimulatorActions,
    choose_statistics,
    fingerprint,
)

ENTRY = {
    "q01": [-1.0, 0.0, 2.0],
    "q99": [3.0, 0.5, 2.5],
    "min": [-2.0, 0.0, 0.0],
    "max": [2.0, 1.0, 4.0],
    "mean": [1.0, 0.25, 0.0],
    "std": [2.0, 0.5, 1.0],
    "mask": [True, True, False],
}


@pytest.mark.parametrize(
    ("kind", "normalised"),
    [
        # 2 (x - low) / (high - low) - 1 and (x - mean) / std of (0, 0.5); 7.7 is masked
        ("quantile", [-0.5, 1.0, 7.7]),
        ("min_max", [0.0, 0.0, 7.7]),
        ("mean_std", [-0.5, 0.5, 7.7]),
    ],
)
def test_the_three_kinds(kind: str, normalised: list[float]):
    recorded = torch.tensor([0.0, 0.5, 7.7])
    normaliser = Normalizer(kind, ENTRY)
    torch.testing.assert_close(normaliser.normalise(recorded), torch.tensor(normalised))
    torch.testing.assert_close(normaliser.restore(torch.tensor(normalised)), recorded)


def test_untouched_dimensions_pass_bit_for_bit():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(500, 3) * 10.0**e for e in (-30, -3, 0, 6, 30)])
    normaliser = Normalizer("quantile", ENTRY, range_epsilon=1e-8)
    for out in (normaliser.normalise(values), normaliser.restore(values)):
        assert torch.equal(out[:, 2], values[:, 2])
        assert out.dtype == values.dtype
    half = values.bfloat16()
    assert torch.equal(normaliser.normalise(half)[:, 2], half[:, 2])


@pytest.mark.parametrize(
    ("kind", "entry", "constant"),
    [
        ("quantile", {"q01": [0.0, -1.0], "q99": [0.0, 1.0]}, 0.0),
        ("quantile", {"q01": [0.3, -1.0], "q99": [0.3, 1.0]}, 0.3),
        ("min_max", {"min": [-2.0, -1.0], "max": [-2.0, 1.0]}, -2.0),
        ("mean_std", {"mean": [0.7, 0.0], "std": [0.0, 1.0]}, 0.7),
    ],
)
def test_constant_dimensions(kind: str, entry: dict, constant: float):
    with pytest.warns(UserWarning, match=r"action dimensions \[0\] are constant"):
        normaliser = Normalizer(kind, entry, range_epsilon=1e-8)
    # the rule on both sides: 0, and back the constant; an epsilon alone would make 0.01 1999999
    batch = torch.tensor([[constant, 0.5], [constant + 0.01, 0.5]])
    out = normaliser.normalise(batch)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.5], [0.0, 0.5]]))
    back = normaliser.restore(torch.tensor([[0.0, 0.5], [0.9, 0.5], [-1.0, 0.5]]))
    assert torch.equal(back[:, 0], torch.full((3,), constant))


def test_an_all_constant_batch_is_finite():
    with pytest.warns(UserWarning, match=r"\[0, 1\]"):
        normaliser = Normalizer("mean_std", {"mean": [1.0, 2.0], "std": [0.0, 0.0]})
    assert torch.equal(normaliser.normalise(torch.ones(4, 2)), torch.zeros(4, 2))


def test_range_epsilon_and_clip():
    entry = {"q01": [0.0], "q99": [1.0]}
    plain, oft = Normalizer("quantile", entry), Normalizer("quantile", entry, range_epsilon=1e-8)
    one = torch.ones(1, dtype=torch.float64)
    assert plain.restore(one).item() == 1.0
    assert oft.restore(one).item() - 1.0 == pytest.approx(1e-8, rel=1e-6)
    clipped = Normalizer("quantile", entry, clip=True)
    assert clipped.normalise(torch.tensor([[-3.0], [0.25], [9.0]])).tolist() == [[-1], [-0.5], [1]]
    assert plain.normalise(torch.tensor([3.0])).tolist() == [5.0]


def test_statistics_that_make_no_sense():
    for entry, message in (
        ({"q01": [1.0], "q99": [0.0]}, "upside down"),
        ({"q01": [math.nan], "q99": [0.0]}, "not finite"),
        ({"q01": [0.0, 1.0], "q99": [0.0]}, "numbers"),
        ({"mean": [0.0], "std": [1.0]}, r"lack \['q01', 'q99'\]; they hold \['mean', 'std'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Normalizer("quantile", entry)
    with pytest.raises(ValueError, match="kind is 'robust'"):
        Normalizer("robust", ENTRY)
    with pytest.raises(ValueError, match="vectors have 2 numbers, the statistics 3"):
        Normalizer("quantile", ENTRY).normalise(torch.zeros(2))


def test_the_key_is_found_or_named(caplog: pytest.LogCaptureFixture):
    one = {"libero_spatial_no_noops": {"action": 1}}
    with pytest.raises(
        ValueError, match=r"FILE has statistics for \['libero_spatial_no_noops'\], and 'libero_spa"
    ):
        choose_statistics(one, "libero_spatial", source="FILE")
    two = {**one, "bridge": {"action": 2}}
    with pytest.raises(ValueError, match=r"\['bridge', 'libero_spatial_no_noops'\].*none was"):
        choose_statistics(two, None, source="FILE")
    with pytest.raises(ValueError, match=r"statistics for \[\]"):
        choose_statistics({}, None, source="FILE")
    assert choose_statistics(two, "bridge", source="FILE") == ("bridge", {"action": 2})
    with caplog.at_level(logging.INFO):
        assert choose_statistics(one, None, source="FILE")[0] == "libero_spatial_no_noops"
    assert "libero_spatial_no_noops" in caplog.text


def test_fingerprint_sees_every_number_and_no_order():
    entry = {"action": {"q01": [0.1, 0.2], "mask": [True, False]}, "n": 3}
    turned = {"n": 3, "action": {"mask": [True, False], "q01": [0.1, 0.2]}}
    assert fingerprint(entry) == fingerprint(turned)
    assert len(fingerprint(entry)) == 16
    other = {**entry, "action": {"q01": [0.1, 0.2000001], "mask": [True, False]}}
    assert fingerprint(other) != fingerprint(entry)


GRIPPER = LiberoGripper()


def test_gripper_sign_and_range():
    torch.manual_seed(0)
    values = torch.randn(5, 7)
    values[:, 6] = torch.tensor([1.0, 0.0, 0.9, 0.1, 0.5])
    out = GRIPPER.to_simulator(DatasetActions(values)).values
    # open (1) is -1 in the simulator; the tie 0.5 closes; never 0
    assert out[:, 6].tolist() == [-1.0, 1.0, -1.0, 1.0, 1.0]
    assert torch.equal(out[:, :6], values[:, :6])
    back = GRIPPER.to_dataset(SimulatorActions(out)).values
    assert back[:, 6].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_the_gripper_cannot_be_converted_twice():
    once = GRIPPER.to_simulator(DatasetActions(torch.rand(2, 7)))
    with pytest.raises(TypeError, match="SimulatorActions given, DatasetActions needed"):
        GRIPPER.to_simulator(once)
    with pytest.raises(TypeError, match="DatasetActions given, SimulatorActions needed"):
        GRIPPER.to_dataset(GRIPPER.to_dataset(once))
    with pytest.raises(TypeError, match="Tensor given"):
        GRIPPER.to_simulator(torch.rand(2, 7))


def test_action_space_goes_there_and_back():
    entry = {"q01": [-0.5, 0.0], "q99": [0.7, 1.0], "mask": [True, False]}
    space = ActionSpace(Normalizer("quantile", entry, range_epsilon=1e-8), GRIPPER)
    control = torch.tensor([[0.1, -1.0], [-0.5, 1.0]])
    torch.testing.assert_close(space.to_simulator(space.from_simulator(control)), control)
    nothing = ActionSpace(None)
    assert nothing.to_simulator(control) is control


def test_statistics_beyond_the_environments_range():
    entry = {"q01": [-0.5], "q99": [25.0]}
    with pytest.raises(ValueError, match=r"reach to 25, but environments take .* in \[-1, 1\]"):
        ActionSpace(Normalizer("quantile", entry))
