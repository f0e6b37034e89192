"""Configurations compose, fit the code they name, and are refused before any process starts."""

import inspect
import multiprocessing.process
import signal
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from programs import ON_POLICY, ROOT, composed, program

from torchrl_vla.loops.run import Budget, EvaluationPlan

CONF = ROOT / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
ALGORITHMS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))


train = program("train")


def targets(node, where: str = "") -> list[tuple[str, str]]:
    """Return every ``_target_`` with its place."""
    if isinstance(node, dict):
        own = [(where, node["_target_"])] if "_target_" in node else []
        return own + [t for key, value in node.items() for t in targets(value, f"{where}.{key}")]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CONF)))
def test_every_target_exists_and_takes_the_given_keys(path: Path):
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    for where, target in targets(content):
        found = get_object(target)
        node = content
        for key in filter(None, where.split(".")):
            node = node[key]
        given = {key: None for key in node if not key.startswith("_") and key != "name"}
        inspect.signature(found).bind_partial(**given)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_composes_and_fits_its_loop(algorithm: str):
    cfg = composed(f"algo={algorithm}")
    assert cfg.algo.name == algorithm
    OmegaConf.resolve(cfg)
    assert not OmegaConf.missing_keys(cfg)
    Budget(**cfg.budget)
    EvaluationPlan(**cfg.evaluation)
    make_policy = instantiate(cfg.policy)
    suite = instantiate(cfg.env)
    tiny = cfg.policy._target_ == "torchrl_vla.policies.tiny.make_policy"
    assert cfg.policy.weights == ("shipped" if tiny and algorithm != "ground" else None)
    policy = make_policy(suite.meta)
    flow = cfg.policy.head == "flow"
    steps = policy.actor.head.real[0] if flow else policy.model.model.chunk_size
    assert steps == cfg.chunk_size
    loop = instantiate(OmegaConf.masked_copy(cfg.algo, [k for k in cfg.algo if k != "name"]))
    assert isinstance(loop, partial)
    shared = {"seed": cfg.seed, "make_policy": make_policy}
    if "gamma" in cfg:
        shared |= {"gamma": cfg.gamma, "resume": False}
    # what launch/train.py calls: every argument of the loop is given, and no other
    bound = inspect.signature(loop.func).bind("run", **loop.keywords, **shared)
    needed = inspect.signature(loop.func).parameters.values()
    assert {p.name for p in needed if p.default is p.empty} <= set(bound.arguments)


def test_both_heads_learn_the_chunk_that_is_executed():
    for algorithm in ALGORITHMS:
        cfg = composed(f"algo={algorithm}", "chunk_size=6")
        assert cfg.policy.chunk_size == 6


def test_the_evaluation_composes():
    cfg = composed("checkpoint=somewhere", name="evaluate")
    assert cfg.checkpoint == "somewhere"
    assert OmegaConf.missing_keys(composed(name="evaluate")) == {"checkpoint"}


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run in an empty folder where starting a process is an error; clean up behind a failure."""

    def refuse(self):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(*overrides: str) -> None:
    """Do what ``python launch/train.py OVERRIDES`` does."""
    cfg = composed("topology.device=cpu", "logger.display=false", *overrides)
    train.main.__wrapped__(cfg)


QUICK = {
    **{name: (f"algo={name}", "policy.weights=null") for name in ON_POLICY},
    "sac": ("algo=sac", "policy.weights=null", "algo.replay.demonstration_episodes=2"),
}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("algorithm", QUICK)
def test_good_settings_reach_the_start_of_the_actors(algorithm: str):
    with pytest.raises(AssertionError, match="a process was started"):
        run(*QUICK[algorithm])


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.updatez.lr=1", "algo.updatez"),
        ("algo.updates.lrr=1", "lrr"),
        ("+algo.updates.lrr=1", "lrr"),
        ("+algo.speed=1", "speed"),
        ("+policy.depth=3", "depth"),
        ("+env.gravity=0", "gravity"),
        ("+budget.hours=1", "hours"),
        ("algo=pp0", "pp0"),
        ("policy=huge", "huge"),
    ],
)
def test_unknown_keys_and_choices(override: str, message: str):
    with pytest.raises((HydraException, TypeError), match=message):
        run(*QUICK["ppo"], override)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("ppo", ("policy.temperature=0",), "temperature is 0"),
        ("ppo", ("policy.eval_decode=best",), "eval_decode is 'best'"),
        ("ppo", ("policy.weights=shipped", "chunk_size=8"), "does not fit the policy"),
        ("ppo", ("policy.weights=shipped", "policy.num_bins=256"), "does not fit the policy"),
        ("ppo", ("policy.head=gaussian",), "stores no log-probs"),
        ("ppo", ("policy.precision=float16",), "precision is 'float16'"),
        ("ppo", ("algo.max_lag=-1",), "max_lag is -1"),
        ("ppo", ("+algo.actors.group_size=8",), "group_size=8 has no use with Gae"),
        ("ppo", ("+algo.objective.dynamic_sampling=true",), "dynamic_sampling=True has no use"),
        ("ppo", ("+algo.updates.head_lr=1",), "head_lr=1 has no use"),
        ("ppo", ("algo.objective.kl_kind=k3",), "kl_kind='k3' has no use"),
        ("ppo", ("algo.objective.kl_weight=0.1",), "needs kl_kind"),
        ("ppo", ("algo.objective.advantage.lmbda=2",), "lmbda is 2"),
        ("ppo", ("algo.updates.target_kl=0",), "target_kl is 0"),
        ("grpo", ("+algo.objective.value_weight=0.5",), "value_weight=0.5 has no use with Group"),
        ("grpo", ("+algo.objective.value_clip=0.2",), "value_clip=0.2 has no use with Group"),
        ("grpo", ("+algo.updates.value_lr=1e-3",), "value_lr=0.001 has no use"),
        ("grpo", ("algo.actors.group_size=1",), "needs actors.group_size"),
        ("grpo", ("gamma=0.99",), "gamma is 0.99, but GroupRelative"),
        ("rloo", ("gamma=0.99",), "gamma is 0.99, but LeaveOneOut"),
        ("reinforce_pp", ("+algo.actors.group_size=8",), "group_size=8 has no use with Reinf"),
        ("ppo_gaussian", ("algo.updates.head_lr=null",), "head_lr is missing"),
        ("ppo_gaussian", ("policy.store_log_probs=false",), "stores no log-probs"),
        ("ppo", ("gamma=1.5",), "gamma is 1.5"),
        ("ppo", ("budget.minutes=null",), "budget has no limit"),
        ("ppo", ("budget.env_steps=-1",), "budget.env_steps is -1"),
        ("ppo", ("resume=sometimes",), "resume='sometimes'"),
        ("ppo", ("seed=200001",), "seed is 200001"),
        ("ppo", ("topology.replicate=2",), "replicate is 2 with 1 ranks"),
        ("ppo", ("env.image_size=65",), "image_size is 65"),
        ("ppo", ("evaluation.episodes=0",), "evaluation.episodes is 0"),
        ("ppo", ("evaluation.final_episodes=0",), "evaluation.final_episodes is 0"),
        ("ppo", ("evaluation.num_envs=0",), "evaluation.num_envs is 0"),
        ("ppo", ("algo.actors.num_workers=0",), "actors.num_workers is 0"),
        ("ppo", ("algo.actors.envs_per_worker=0",), "actors.envs_per_worker is 0"),
        ("ppo", ("algo.actors.decisions_per_env=0",), "actors.decisions_per_env is 0"),
        ("ppo", ("algo.actors.timeout=0",), "actors.timeout is 0"),
        ("ppo", ("+algo.actors.group_size=0",), "actors.group_size is 0"),
        ("ppo", ("algo.updates.minibatch_size=0",), "updates.minibatch_size is 0"),
        ("ppo", ("algo.updates.epochs=0",), "updates.epochs is 0"),
        ("ppo", ("algo.updates.micro_batch_size=0",), "micro_batch_size is 0"),
        ("ppo", ("algo.updates.max_grad_norm=0",), "max_grad_norm"),
        ("sac", ("policy.head=tokens",), "head"),
        ("sac", ("policy.eval_decode=argmax",), "eval_decode is 'argmax'"),
        ("sac", ("algo.objective.tau=0",), "tau is 0"),
        ("sac", ("algo.objective.alpha=0",), "alpha"),
        ("sac", ("algo.updates.q_heads=1",), "1 critic given"),
        ("sac", ("algo.pace.updates_per_decision=0",), "updates_per_decision is 0"),
        ("sac", ("algo.pace.publish_updates=0",), "publish_updates is 0"),
        ("sac", ("algo.replay.demonstration_share=2",), "demonstration_share is 2"),
        ("sac", ("algo.replay.batch_size=0",), "batch_size is 0"),
        ("sac", ("algo.replay.capacity=0",), "capacity is 0"),
    ],
)
def test_contradictory_settings(algorithm: str, overrides: tuple[str, ...], message: str):
    with pytest.raises((HydraException, ValueError, TypeError), match=message):
        run(*QUICK[algorithm], *overrides)


@pytest.mark.usefixtures("no_process")
def test_a_used_folder_needs_a_resume(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 7\n")
    with pytest.raises(ValueError, match="run_dir=mine holds a run; use resume=auto"):
        run(*QUICK["ppo"], "run_dir=mine")
    assert (tmp_path / "mine" / "config.yaml").read_text() == "seed: 7\n"


def choose(**settings):
    given = {"resume": "never", "run_dir": None, "algo": {"name": "ppo"}}
    return train.choose_folder(OmegaConf.create(given | settings))


def test_folders_made_in_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Field case B38: the clock stands still for three jobs.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.time, "strftime", lambda form: "20300101-000000")
    found = [choose() for _ in range(3)]
    assert len({folder for folder, _ in found}) == 3
    assert all(folder.is_dir() and not resume for folder, resume in found)
    assert all(folder.name.startswith("ppo-20300101-000000") for folder, _ in found)


def test_resume_finds_the_last_run_of_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder, resume = choose(resume="auto")  # nothing there yet: a new run
    assert not resume
    (folder / "config.yaml").write_text("seed: 0\n")
    assert choose(resume="auto") == (folder, True)
    other, resume = choose(resume="auto", algo={"name": "sac"})
    assert (other != folder, resume) == (True, False)
    assert choose(resume="auto", run_dir=str(folder)) == (folder, True)
    new = tmp_path / "new"
    assert choose(resume="auto", run_dir=str(new)) == (new, False)
    with pytest.raises(ValueError, match="holds a run"):
        choose(run_dir=str(folder))
    assert choose(resume=str(folder)) == (folder, True)
    with pytest.raises(ValueError, match=r"resume='.*new': use never, auto, or the"):
        choose(resume=str(new))
    with pytest.raises(ValueError, match="are two folders"):
        choose(resume=str(folder), run_dir=str(new))
