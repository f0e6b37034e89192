"""Action bins at a vocabulary's tail."""

import math

import pytest
import torch
from torchrl.data.vla import VocabTailActionTokenizer

from torchrl_vla.objectives.action_log_prob import window_log_probs
from torchrl_vla.policies.action_tokens import ActionWindow, TailBins
from torchrl_vla.policies.statistics import ActionSpace, LiberoGripper, Normalizer

LLAMA = ActionWindow(32000)


def test_edges_and_centres():
    # OpenVLA's numbers: 256 edges, 255 centres; id = 32000 - digitize
    bins = TailBins().encode(torch.tensor([-1, -0.073, 0, 0.5, 1]))
    assert LLAMA.ids(bins).tolist() == [31999, 31881, 31872, 31808, 31744]
    decoded = TailBins().decode(bins)
    wanted = torch.tensor([-0.996078, -0.070588, 0.0, 0.501961, 0.996078])
    torch.testing.assert_close(decoded, wanted, atol=1e-6, rtol=0)


def test_exactly_256_ids_and_none_beside_them():
    every = torch.arange(256)
    assert (LLAMA.ids(every).min(), LLAMA.ids(every).max()) == (31744, 31999)
    assert torch.equal(LLAMA.bins(LLAMA.ids(every)), every)
    for wrong in (31743, 32000):
        with pytest.raises(ValueError, match=rf"{wrong}\.\.{wrong}, outside 31744\.\.31999"):
            LLAMA.bins(torch.tensor([wrong]))
    for wrong in (-1, 256):
        with pytest.raises(ValueError, match=r"outside 0\.\.255"):
            LLAMA.ids(torch.tensor([wrong]))
    with pytest.raises(TypeError, match="float32"):
        LLAMA.ids(torch.zeros(1))
    assert LLAMA.nearest_bins(torch.tensor([5, 31743, 31744, 31999, 32063])).tolist() == [
        *(0, 0, 0),
        *(255, 255),
    ]


def test_round_trip_error():
    grid = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    codec = TailBins()
    error = (codec.centres[codec.encode(grid)] - grid).abs().max()
    # half of the distance 2 / 255 between two edges
    assert error == pytest.approx(1 / 255, abs=1e-7)
    again = codec.encode(codec.decode(torch.arange(256)))
    # bin 0 holds exactly +1 only; its centre falls into bin 1
    assert torch.equal(again, torch.arange(256).clamp(min=1))


def test_order_is_that_of_torchrls_tokenizer():
    grid = torch.linspace(-0.999, 0.999, 500)
    assert torch.equal(TailBins().encode(grid), VocabTailActionTokenizer(256).encode(grid))


def test_one_support_for_actor_and_learner():
    head = torch.zeros(32064, 4)
    logits = head[LLAMA.columns] @ torch.ones(4)
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    log_probs, entropy = window_log_probs(logits.expand(1, 7, -1), tokens)
    # ln 256 = 5.545177, seven tokens 38.816242; over the padded width it would be -10.375
    assert log_probs.sum().item() == pytest.approx(-38.816242, abs=1e-5)
    assert entropy[0, 0].item() == pytest.approx(math.log(256), abs=1e-6)


def test_actions_pass_statistics_and_gripper():
    entry = {"q01": [-0.5, 0.0], "q99": [0.5, 1.0], "mask": [True, False]}
    codec = TailBins(256, ActionSpace(Normalizer("quantile", entry), LiberoGripper()))
    actions = torch.tensor([[0.25, -1.0], [-0.5, 1.0]])
    bins = codec.encode(actions)
    # 0.25 of [-0.5, 0.5] is 0.5 of [-1, 1]: id 31808; open (-1) is 1.0 in the data: 31744
    # -0.5 is -1: id 31999; closed (+1) is 0.0 in the data: id 31872
    assert LLAMA.ids(bins).tolist() == [[31808, 31744], [31999, 31872]]
    decoded = codec.decode(bins)
    # centres 0.501961, -0.996078 halved; the gripper is exact
    wanted = torch.tensor([[0.2509804, -1.0], [-0.4980392, 1.0]])
    torch.testing.assert_close(decoded, wanted, atol=1e-6, rtol=0)
    assert decoded.dtype == torch.float32


def test_numbers_that_no_bin_stands_for():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or inf"):
            TailBins().encode(torch.tensor([0.0, bad]))
    # beyond the statistics' range: the outermost bin
    assert TailBins().encode(torch.tensor([-1.3, 1.3])).tolist() == [255, 0]


def test_window_sizes():
    with pytest.raises(ValueError, match=r"num_bins is 300; it must be in 2\.\.200"):
        ActionWindow(200, 300)
    small = ActionWindow(20, 8)
    assert (small.first, small.columns) == (12, slice(12, 20))
    assert TailBins(8).decode(torch.tensor([0, 1, 7])).tolist() == pytest.approx(
        # edges every 2/7: centres 6/7, 4/7, ..., -6/7
        [6 / 7, 6 / 7, -6 / 7]
    )
