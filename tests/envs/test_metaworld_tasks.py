"""Meta-World's tasks in words; needs no Meta-World."""

import pytest

from torchrl_vla.envs.metaworld_tasks import MT10, SENTENCES, TASK_SETS, choose_tasks
from torchrl_vla.envs.splits import SPLITS, position_in_split


def test_every_task_has_its_own_plain_sentence():
    assert len(SENTENCES) == 50
    assert len(set(SENTENCES.values())) == 50
    for sentence in SENTENCES.values():
        assert all(word.isalpha() and word.islower() for word in sentence.split()), sentence


def test_tasks_are_chosen_by_name_set_or_list():
    assert choose_tasks("reach-v3") == ("reach-v3",)
    assert choose_tasks("mt10") == MT10
    assert choose_tasks("mt50") == TASK_SETS["mt50"] == tuple(SENTENCES)
    assert choose_tasks(["push-v3", "reach-v3"]) == ("push-v3", "reach-v3")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reach-v2", "task 'reach-v2' is unknown"),
        (["reach-v3", "mt10"], "task 'mt10' is unknown"),
        (["reach-v3", "reach-v3"], "each once"),
        ([], "at least one task"),
    ],
)
def test_wrong_tasks_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        choose_tasks(task)


def test_positions_count_from_the_start_of_a_split():
    assert [position_in_split(ids.start + 7) for ids in SPLITS.values()] == [7] * 4
    assert position_in_split(SPLITS["train"].stop - 1) == 10**15 - 1
    for wrong in (-1, 4 * 10**15):
        with pytest.raises(ValueError, match=f"init_state_id is {wrong}"):
            position_in_split(wrong)
