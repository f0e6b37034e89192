"""Evaluation: the same result however it is run, each state once, honest numbers and films."""

import dataclasses
import json
import math

import av
import pytest
import torch
from envs.counter import META, SPLITS, CounterSuite, shown
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.evaluate import (
    EpisodeResult,
    as_rows,
    film,
    fingerprint,
    list_of,
    perturb,
    run_episodes,
    summarise,
)
from torchrl_vla.policies.tiny import make_policy

EVAL = SPLITS["eval"].start
IDS = list(range(EVAL, EVAL + 12))


class Obey(TensorDictModuleBase):
    """Counts up as fast as the instruction says; remembers what it was shown."""

    def __init__(self, noise: float = 0.0):
        super().__init__()
        self.in_keys, self.out_keys = [schema.IMAGE, schema.TASK_ID], [schema.CHUNK]
        self.noise = noise
        self.seen = []

    def forward(self, td):
        assert exploration_type() == ExplorationType.DETERMINISTIC
        assert td.batch_size == (1,)
        self.seen.append((shown(td[schema.IMAGE][0]), int(td[schema.TASK_ID])))
        speed = torch.tensor([0.5, 1.0, -0.5])[td[schema.TASK_ID]]
        speed = speed + self.noise * torch.randn(1, 1)
        td.set(schema.CHUNK, speed.clamp(-1, 1)[..., None].expand(1, 4, 2).clone())
        return td


@pytest.fixture(scope="module")
def tabletop():
    suite = TabletopSuite()
    first = suite.splits["eval"].start
    return suite, range(first, first + 12)


@pytest.mark.parametrize("decode", ["mean", "sample"])
def test_results_do_not_depend_on_the_number_of_simulators(tabletop, decode: str):
    suite, ids = tabletop
    policy = make_policy(suite.meta, eval_decode=decode)
    results = []
    for number, num_envs in enumerate((1, 4, 10, 4)):  # the last is a second run
        torch.manual_seed(number)  # nor on the state of the global generator
        simulators = suite.simulators(num_envs)
        results.append(run_episodes(policy, simulators, ids, chunk_size=4))
        simulators.close()
    assert results[0] == results[1] == results[2] == results[3]
    assert len({r.trace for r in results[0]}) == len(ids)  # equal to the bit, not by chance
    assert [r.init_state_id for r in results[0]] == list(ids)
    # contact physics tells the slightest difference by the number of steps
    assert len({r.env_steps for r in results[0]}) > 1


def test_sampled_decisions_depend_on_state_and_decision_only():
    def run(ids, num_envs, seed):
        torch.manual_seed(seed)
        policy = Obey(noise=0.3)
        suite = CounterSuite(goal=3.0)
        return run_episodes(policy, suite.simulators(num_envs), ids, chunk_size=4)

    whole = run(IDS, 4, 0)
    assert run(IDS, 3, 1) == whole
    assert run(IDS[5:9], 2, 2) == whole[5:9]
    # the noise of two episodes of one task is not the same noise
    assert len({r.env_steps for r in whole if r.task_id == whole[0].task_id}) > 1


def test_another_seed_is_another_sample_and_only_that():
    def run(seed, noise=0.3):
        simulators = CounterSuite(goal=3.0).simulators(2)
        return run_episodes(Obey(noise=noise), simulators, IDS[:4], chunk_size=4, seed=seed)

    assert run(1) == run(1)
    assert [r.seed for r in run(1)] == [1] * 4
    assert {r.trace for r in run(1)}.isdisjoint(r.trace for r in run(0))
    assert [r.trace for r in run(1, 0.0)] == [r.trace for r in run(0, 0.0)]


def test_the_list_names_what_was_run_and_not_how_it_went():
    def listed(results, meta=META):
        return list_of(results, meta)["sha256"]

    base = [result(0, 0, "success"), result(1, 2, "time out")]
    assert listed(base) == listed([result(1, 2, "success"), result(0, 0, "failure")])
    others = [
        base[:1],
        [result(0, 0, "success"), result(2, 2, "time out")],
        [result(0, 1, "success"), result(1, 2, "time out")],
        [dataclasses.replace(r, seed=1) for r in base],
    ]
    assert len({listed(other) for other in [base, *others]}) == 5
    assert listed(base, dataclasses.replace(META, max_steps=13)) != listed(base)
    named = list_of(base, META)
    assert (named["suite"], named["cases"], named["max_steps"]) == ("counter", 2, 12)


def test_decisions_are_computed_on_one_thread_and_the_rest_is_left_alone():
    threads = []

    class Counting(Obey):
        def forward(self, td):
            threads.append(torch.get_num_threads())
            if len(threads) == 3:
                raise ArithmeticError("a policy that fails")
            return super().forward(td)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ArithmeticError):
            run_episodes(Counting(), CounterSuite(goal=3.0).simulators(2), IDS[:4], chunk_size=4)
        assert threads == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_episodes(Obey(noise=0.3), CounterSuite().simulators(2), IDS[:3], chunk_size=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_envs", [1, 3, 4, 20])
@pytest.mark.parametrize("goal", [1.0, math.inf])
def test_each_state_is_used_once(num_envs: int, goal: float):
    # Field case B37: a policy that succeeds in its first decision, and one that never does.
    ended = []
    results = run_episodes(
        Obey(),
        CounterSuite(goal=goal).simulators(num_envs),
        IDS[:10],
        chunk_size=4,
        on_episode=ended.append,
    )
    assert [r.init_state_id for r in results] == IDS[:10]
    assert sorted(ended, key=lambda r: r.init_state_id) == results
    assert [r.task_id for r in results] == [i % 3 for i in IDS[:10]]


def test_outcomes_and_steps():
    # id % 5: 0 succeeds after 6 steps, 1 fails after 3, 2 diverges in step 5, 3 has no end,
    # 4 fails in the last step of the limit (12)
    suite = CounterSuite(
        lengths=(6, 3, math.inf, math.inf, 12),
        successes=(True, False, True, True, False),
        broken=(False, False, True, False, False),
        fault_step=5,
    )
    assert EVAL % 5 == 0
    results = run_episodes(Obey(), suite.simulators(2), IDS[:5], chunk_size=4)
    assert [(r.outcome, r.success, r.env_steps) for r in results] == [
        ("success", True, 6),
        ("failure", False, 3),
        ("sim error", False, 5),
        ("time out", False, 12),
        ("time out", False, 12),
    ]


def test_an_episode_that_the_suite_cuts_off_ran_out_of_time():
    suite = CounterSuite(cuts=(5,))
    (cut,) = run_episodes(Obey(), suite.simulators(1), IDS[:1], chunk_size=4)
    assert (cut.outcome, cut.success, cut.env_steps) == ("time out", False, 5)


def test_no_initial_states():
    with pytest.raises(ValueError, match="no initial-state ids"):
        run_episodes(Obey(), CounterSuite().simulators(1), [], chunk_size=4)


def one_state(task_id: int):
    counters = CounterSuite().simulators(1)
    counters.reset(0, IDS[0])
    td = TensorDict(batch_size=[1])
    td[schema.IMAGE] = torch.from_numpy(counters.render(0))[None]
    td[schema.STATE] = torch.from_numpy(counters.state(0))[None]
    td[schema.TASK_ID] = torch.tensor([[task_id]])
    return td


def test_perturbations_change_one_thing_and_not_the_original():
    generator = torch.Generator().manual_seed(0)
    td = one_state(0)
    kept = td.clone()
    assert perturb(td, META, "none", generator) is td
    grey = perturb(td, META, "grey_image", generator)
    assert (grey[schema.IMAGE] == 128).all()
    assert grey[schema.IMAGE].dtype == torch.uint8
    assert torch.equal(grey[schema.STATE], td[schema.STATE])
    assert torch.equal(grey[schema.TASK_ID], td[schema.TASK_ID])
    drawn = [
        int(perturb(td, META, "random_instruction", generator)[schema.TASK_ID]) for _ in range(200)
    ]
    # tasks 0 and 1 share the name "up", 2 is "down": 100 each, standard deviation 7.1
    assert set(drawn) == {0, 1}
    assert abs(drawn.count(0) - 100) < 36
    down = perturb(one_state(2), META, "random_instruction", generator)
    assert int(down[schema.TASK_ID]) == 2
    assert torch.equal(down[schema.IMAGE], td[schema.IMAGE])
    assert (td == kept).all()
    with pytest.raises(ValueError, match=r"'blur' is unknown; use one of .'none', 'random_"):
        perturb(td, META, "blur", generator)


def test_a_wrong_instruction_stays_wrong_for_the_whole_episode():
    def told(task_id: int, init_state_id: int, decision: int) -> int:
        td = one_state(task_id)
        td[schema.INIT_STATE_ID] = torch.tensor([[init_state_id]])
        generator = torch.Generator().manual_seed(decision)
        return int(perturb(td, META, "wrong_instruction", generator)[schema.TASK_ID])

    # tasks 0 and 1 share the name "up"; 2 is the only "down", so another task's sentence is wrong
    assert {told(0, i, 0) for i in range(20)} == {1}
    assert {told(1, i, 0) for i in range(20)} == {0}
    assert {told(2, i, 0) for i in range(20)} == {0, 1}
    for i in range(20):
        assert len({told(2, i, decision) for decision in range(5)}) == 1
    lonely = dataclasses.replace(
        META, instructions=META.instructions[:1], task_names=META.task_names[:1]
    )
    td = one_state(0)
    td[schema.INIT_STATE_ID] = torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"has one instruction, .*; perturbation=wrong_instr"):
        perturb(td, lonely, "wrong_instruction", torch.Generator())


def test_a_perturbed_evaluation_is_reproducible_and_judged_by_the_true_task():
    runs = []
    for num_envs in (1, 4):
        policy = Obey()
        simulators = CounterSuite(goal=4.0).simulators(num_envs)
        results = run_episodes(
            policy, simulators, IDS, chunk_size=4, perturbation="random_instruction"
        )
        runs.append(results)
        assert [r.task_id for r in results] == [i % 3 for i in IDS]
        told = {task for (init_state, _), task in policy.seen if init_state % 3 == 0}
        assert told == {0, 1}
    assert runs[0] == runs[1]
    policy = Obey()
    grey = run_episodes(
        policy, CounterSuite().simulators(2), IDS[:2], chunk_size=4, perturbation="grey_image"
    )
    assert [r.init_state_id for r in grey] == IDS[:2]
    assert {step for (_, step), _ in policy.seen} == {128}


def result(number: int, task_id: int, outcome: str) -> EpisodeResult:
    return EpisodeResult(number, task_id, outcome == "success", outcome, 4)


def test_summary_by_hand():
    results = [
        result(0, 0, "success"),
        result(1, 0, "time out"),
        result(2, 1, "success"),
        result(3, 1, "success"),
        result(4, 2, "sim error"),
    ]
    table = summarise(results, META)
    assert (table["success_rate"], table["successes"], table["episodes"]) == (0.6, 3, 5)
    # Wilson, z = 1.96, p = 0.6, n = 5: centre 0.6 + 3.8415 / 10 = 0.98415,
    # half 1.96 sqrt(0.24 / 5 + 3.8415 / 100) = 0.57615, scale 1.7683
    assert table["interval"] == pytest.approx([0.2307, 0.8824], abs=1e-4)
    assert list(table["per_task"]) == ["down", "up"]
    up, down = table["per_task"]["up"], table["per_task"]["down"]
    # centre 0.75 + 3.8415 / 8 = 1.23018, half 1.96 sqrt(0.1875 / 4 + 3.8415 / 64) = 0.64082,
    # scale 1.96037
    assert (up["success_rate"], up["successes"], up["episodes"]) == (0.75, 3, 4)
    assert up["interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    # 0 of 1: high = 3.8415 / 4.8415
    assert (down["success_rate"], down["interval"][0]) == (0.0, 0.0)
    assert down["interval"][1] == pytest.approx(0.7935, abs=1e-4)
    rates = {name: row["success_rate"] for name, row in table["per_instruction"].items()}
    assert rates == {"count up slowly": 0.5, "count up fast": 1.0, "count down": 0.0}
    assert table["outcomes"] == {"sim error": 1, "success": 3, "time out": 1}
    json.dumps([table, as_rows(results), fingerprint()])
    assert as_rows(results)[1] == dataclasses.asdict(results[1])


def test_the_fingerprint_names_what_matters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    found = fingerprint()
    assert found["torch"].startswith(torch.__version__.split("+")[0])
    assert found["gl"] == "osmesa"
    assert {"python", "torchrl", "tensordict", "mujoco", "torchrl_vla"} <= found.keys()


def test_a_film_shows_every_control_step(tmp_path):
    suite = CounterSuite(lengths=(5, 9), successes=(True, False))
    path = tmp_path / "film.mp4"
    results = film(Obey(), suite.simulators(1), IDS[:2], path, chunk_size=4, size=64)
    assert results == run_episodes(Obey(), suite.simulators(3), IDS[:2], chunk_size=4)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert stream.average_rate == META.control_hz == 10
    # one frame per control step, and each outcome is held for 0.7 s = 7 frames
    assert len(frames) == (5 + 7) + (9 + 7)
    # the counter's frames get lighter by 10 with every step; the picture fills the upper rows
    seen = [int(frame[: frame.shape[1] // 2].mean()) for frame in frames]
    wanted = [10 * k for k in (1, 2, 3, 4, 5, *[5] * 7, *range(1, 10), *[9] * 7)]
    assert seen == pytest.approx(wanted, abs=4)


def test_a_film_has_one_actor(tmp_path):
    with pytest.raises(ValueError, match="2 simulators"):
        film(Obey(), CounterSuite().simulators(2), IDS[:2], tmp_path / "a.mp4", chunk_size=4)
    assert not any(tmp_path.iterdir())
