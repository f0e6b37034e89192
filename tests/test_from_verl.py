"""Every row of ``docs/from-verl.md`` names something that is really there, and none is missing.

Of ours, a Python name must resolve, a key must exist in the composed configuration, a metric must
be one that the sources log, a tensor must be in the schema, a file must exist. Of theirs, the lists
below say what has to have a row.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from torchrl_vla import metrics, schema

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from-verl.md").read_text()
HEAD = "| theirs | kind | ours | what differs, and why |"
SILENT = ("counts", "row_counts", "save")
"""Functions whose keys are denominators or files, not metrics."""
PACKAGES = ("torchrl_vla.", "torchrl.", "tensordict.", "transformers.", "torch.")

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model.override_config"
ROLLOUT = "actor_rollout_ref.rollout"
THEIRS = {
    "command": """
        main_ppo main_sac prepare_libero_dataset
        vvla-dagger vvla-eval vvla-record vvla-replay vvla-teleop
        vvla-train-recap vvla-train-sac vvla-train-sft
    """,
    "class": """
        RobRayPPOTrainer RobRaySACTrainer RobActorRolloutRefWorker DataProto
        RobDataParallelPPOActor RobDataParallelSACActor BaseSACActor SupportSACTraining
        SACReplayPool NaiveRolloutRob PI0RolloutRob Role.ActorRollout Role.Env
        EnvLoop EnvWorker EnvManager LiberoEnv IsaacEnv
        TrainCluster BaseEnv EpisodeBuffer SACTrainingWorker HFRollout
    """,
    "function": """
        RobRayPPOTrainer.fit RobRayPPOTrainer.init_workers
        RobRaySACTrainer.fit RobRaySACTrainer.init_workers
        update_actor update_critic update_target_network switch_to_rollout switch_to_train
        RobDataParallelPPOActor.compute_log_prob RobDataParallelPPOActor.update_policy
        RobDataParallelSACActor.update_policy
        compute_response_mask generate_traj_mask flatten_trajectories process_tensor
        calculate_reward compute_advantage compute_policy_loss apply_kl_penalty
        add_transition_prefixes embed_prefix
        SupportSACTraining.sac_init SupportSACTraining.sac_get_critic_parameters
        SupportSACTraining.sac_get_named_actor_parameters
        SupportSACTraining.sac_forward_state_features SupportSACTraining.sac_forward_actor
        SupportSACTraining.sac_forward_critic SupportSACTraining.bc_loss
        SupportSACTraining.sac_update_target_network
        SACReplayPool.add_batch SACReplayPool.sample_batch SACReplayPool.insert_and_resample
        SACReplayPool.save SACReplayPool.load SACReplayPool.from_path
        EnvLoop.generate_sequences EnvWorker.reset_envs_to_state_ids
        EnvWorker.env_interact_step EnvWorker.finish_rollout LiberoEnv.chunk_step
        TrainCluster.start TrainCluster.shutdown TrainCluster.rollout TrainCluster.train
        TrainCluster.eval TrainCluster.record TrainCluster.replay TrainCluster.update_weights
        TrainCluster.save_checkpoint TrainCluster.load_checkpoint
    """,
    "tensor": """
        complete response_mask responses input_ids attention_mask pixel_values old_log_probs
        advantages uid state_ids env_state_id task_ids critic_value
        full_action action s0.* s1.* a0.* a1.* states images image_masks lang_tokens lang_masks
        rewards dones valids positive_sample_mask t0.* t1.*
    """,
    "key": f"""
        train_rollout_pool env_gpu_pool gradient_steps_per_env_step
        algorithm.adv_estimator algorithm.use_kl_in_reward critic.strategy
        data.train_batch_size data.val_batch_size
        env.rollout.pipeline_stage_num env.actor.model.num_action_chunks
        env.actor.model.action_dim env.train.simulator_type env.train.max_episode_steps
        env.train.reward_coef env.train.step_penalty env.train.only_eval env.train.seed
        env.train.num_envs env.train.task_suite_name
        env.train.video_cfg.save_video env.train.video_cfg.video_base_dir
        env.train.init_params.camera_heights env.train.init_params.camera_widths
        env.train.init_params.camera_names env.train.init_params.camera_depths
        env.disagg_sim.enable env.disagg_sim.nnodes actor_rollout_ref.algorithm
        {MODEL}.sac_enable {MODEL}.critic_head_num {MODEL}.critic_prefix_attn_heads
        {MODEL}.flow_sde_enable {MODEL}.flow_sde_noise_level
        {MODEL}.flow_sde_rollout_noise_scale {MODEL}.flow_sde_train_noise_scale
        {MODEL}.flow_sde_initial_beta {MODEL}.flow_sde_beta_min
        {MODEL}.flow_sde_beta_schedule_T
        {ACTOR}.sac.gamma {ACTOR}.sac.tau {ACTOR}.sac.bc_loss_coef {ACTOR}.sac.initial_alpha
        {ACTOR}.sac.auto_entropy {ACTOR}.sac.alpha_type {ACTOR}.sac.alpha_lr
        {ACTOR}.sac.target_entropy {ACTOR}.sac.critic_replay_positive_sample_ratio
        {ACTOR}.sac.actor_replay_positive_sample_ratio
        {ACTOR}.critic_lr {ACTOR}.critic_weight_decay {ACTOR}.warm_rollout_steps
        {ACTOR}.critic_warmup_steps {ACTOR}.actor_update_interval
        {ACTOR}.actor_ema_enabled {ACTOR}.actor_ema_decay {ACTOR}.replay_pool_single_size
        {ACTOR}.replay_pool_save_interval {ACTOR}.replay_pool_save_dir
        {ACTOR}.optim.lr {ACTOR}.grad_clip {ACTOR}.strategy {ACTOR}.num_images_in_input
        {ACTOR}.optim.weight_decay {ACTOR}.optim.betas
        {ACTOR}.fsdp_config.model_dtype {ACTOR}.fsdp_config.wrap_policy
        {ACTOR}.fsdp_config.fsdp_size {ACTOR}.fsdp_config.param_offload
        {ACTOR}.fsdp_config.optimizer_offload
        {ACTOR}.ppo_mini_batch_size {ACTOR}.traj_mini_batch_size
        {ACTOR}.ppo_micro_batch_size_per_gpu
        {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high {ACTOR}.clip_ratio_c
        {ACTOR}.entropy_coeff {ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef
        {ROLLOUT}.temperature {ROLLOUT}.prompt_length {ROLLOUT}.n {ROLLOUT}.mode {ROLLOUT}.name
        {ROLLOUT}.val_kwargs.do_sample
        trainer.rollout_interval trainer.n_env_gpus_per_node trainer.n_rollout_gpus_per_node
        trainer.nnodes trainer.save_freq trainer.test_freq trainer.total_epochs
        trainer.total_training_steps trainer.val_before_train
        trainer.rollout_times trainer.warm_rollout_steps trainer.async_rollout
        trainer.step_penalty trainer.eval_episodes trainer.val_only trainer.esi_redundant_time
        trainer.logger checkpoint.resume_mode checkpoint.max_actor_ckpt_to_keep
        actor.mini_batch_size actor.micro_batch_size actor.ema_decay actor.sac.backup_entropy
        actor.td3.enabled actor.td3.bc_alpha actor.cql.enabled actor.cql.alpha
        actor.cql.temperature actor.cql.noise_scale actor.critic.gamma actor.critic.tau
        actor.critic.lr actor.critic.weight_decay actor.critic.grad_clip
        actor.critic.warmup_steps actor.critic.only_steps_after_rollout
        actor.critic.force_target_tau_one_in_warmup actor.critic.skip_update_when_actor_update
        actor.critic.resample_target_action
        replay.critic_positive_sample_ratio replay.actor_positive_sample_ratio
        replay.online_sample_batch_size replay.offline_sample_batch_size
        replay.online_single_size replay.offline_single_size replay.save_interval
        replay.save_dir
        rlpd.enable rlpd.episodes rlpd.max_transitions rlpd.submit_max_transitions
        rlpd.action_chunk_steps rlpd.transition_stride rlpd.include_final_transition
        env_loop.pipeline_stage_num env_loop.max_interactions
        env_worker.auto_reset env_worker.num_envs env_worker.simulator_start_timeout_s
        env_worker.modes env_worker.confirm_before_record env_worker.log_step_latency
        env_worker.target_step_hz env_worker.action_execution
        simulator.task_ids simulator.num_trials_per_task simulator.specific_reset_id
        simulator.reset_warmup_steps recorder.* teleop.* dsrl.* recap.* sft.*
        cluster.* ray_kwargs.* global_profiler.*
    """,
    "metric": """
        actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy
        actor/grad_norm actor/lr actor/loss actor/logprob_mean actor/qvalue_mean
        actor/flow_sde_beta actor/flow_sde_step
        critic/loss critic/lr critic/grad_norm critic/qvalue0_mean critic/qvalue1_mean
        critic/positive_qvalue_mean critic/negative_qvalue_mean
        critic/diff_pos_neg_qvalue_mean
        critic/score/* critic/rewards/* critic/advantages/* critic/returns/* response_length/*
        data/reward_mean data/valid_ratio data/trajectory_avg_reward
        data/avg_positive_trajectory_length
        sac/critic_replay_sampled_ratio sac/actor_replay_sampled_ratio
        sac/replay_pool_positive_size sac/replay_pool_negative_size sac/replay_task_count
        sac/replay_pool_size sac/alpha sac/alpha_lr sac/alpha_loss sac/alpha_grad_norm
        sac/actor_ema_enabled sac/actor_ema_decay
        training/global_step training/epoch timing_s/* perf/throughput
        val/avg_reward val/avg_positive_trajectory_length
    """,
}
"""What users of theirs know by name, by kind."""


class Row(NamedTuple):
    theirs: str
    kind: str
    ours: str
    why: str

    @property
    def names(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.theirs)

    @property
    def references(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.ours)


def rows() -> list[Row]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 4 for row in cells), "a row has more or fewer than four cells"
    header = [cell.strip() for cell in HEAD.strip("|").split("|")]
    return [Row(*row) for row in cells if row != header and set(row[0]) != {"-"}]


ROWS = rows()
OURS = [(row, reference) for row in ROWS for reference in row.references]


# -- what of ours exists ----------------------------------------------------------------------


def member(owner: object, name: str) -> object | None:
    """Return an attribute, or a truthy stand-in for a field or parameter; ``None`` for neither."""
    if hasattr(owner, name):
        return getattr(owner, name)
    if dataclasses.is_dataclass(owner) and name in {f.name for f in dataclasses.fields(owner)}:
        return name
    if inspect.isclass(owner) and name in inspect.get_annotations(owner):
        return name
    # Of a class the constructor's own: a metaclass may hide it behind `*args`.
    called = owner.__init__ if inspect.isclass(owner) else owner
    if callable(called) and name in inspect.signature(called).parameters:
        return name
    return None


def python_name_exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object | None = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise  # the module is there; something that it imports is not
            continue
        for name in parts[length:]:
            found = member(found, name)
            if found is None:
                return False
        return True
    return False


@functools.cache
def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("train", list(overrides)), resolve=False)


def key_exists(reference: str) -> bool:
    *overrides, key = reference.split()
    node: object = composed(*overrides)
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def text_of(node: ast.expr | None) -> str | None:
    """Return a string constant; of an f-string, with ``*`` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def made_keys(node: ast.AST) -> Iterator[str | None]:
    """Yield what ``node`` makes a key of: in a dict, by ``x[...] =``, or as a group's name."""
    if isinstance(node, ast.Dict):
        yield from map(text_of, node.keys)
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (text_of(at.slice) for at in targets if isinstance(at, ast.Subscript))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ParameterGroup":
        yield from map(text_of, node.args[:1])


@functools.cache
def keys_in_the_sources() -> frozenset[str | None]:
    """Return keys made where metrics are returned; ``grad_norm/*`` stands for an f-string."""
    found: set[str | None] = set()
    rooms = ("objectives", "loops", "replay")
    paths = [path for room in rooms for path in (ROOT / "torchrl_vla" / room).glob("*.py")]
    for path in (*paths, ROOT / "torchrl_vla" / "learner.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in SILENT:
                found |= {key for node in ast.walk(function) for key in made_keys(node)}
    return frozenset(found)


def metric_is_logged(name: str) -> bool:
    constants = [value for key, value in vars(metrics).items() if key.isupper()]
    if any(isinstance(value, str) and value == name for value in constants):
        return True
    kind, _, group = name.partition("/")
    keys = keys_in_the_sources()
    return name in keys or (f"{kind}/*" in keys and group in keys)


def tensor_exists(name: str) -> bool:
    return name in {f.key if isinstance(f.key, str) else ".".join(f.key) for f in schema.SCHEMA}


def exists(kind: str, reference: str) -> bool:
    if reference.startswith(PACKAGES):
        return python_name_exists(reference)
    if re.match(r"(launch|docs|conf)/", reference):
        return (ROOT / reference).is_file()
    if kind == "metric":
        return metric_is_logged(reference)
    if kind == "tensor":
        return tensor_exists(reference)
    return kind == "key" and key_exists(reference)


# -- the page ---------------------------------------------------------------------------------


def test_rows_are_whole():
    faults = []
    for row in ROWS:
        if row.kind not in THEIRS:
            faults.append(f"unknown kind {row.kind!r}: {row}")
        if not row.names or re.sub(r"`[^`]+`|,| ", "", row.theirs):
            faults.append(f"theirs is not a list of `names`: {row}")
        if not row.why:
            faults.append(f"nothing is said about {row.theirs}")
        if row.ours == "none":
            if not row.why.startswith(("On purpose: ", "Not yet")):
                faults.append(f"none, on purpose or not yet? {row}")
        elif not row.references or re.sub(r"`[^`]+`|,| ", "", row.ours):
            faults.append(f"ours is neither `names` nor none: {row}")
    assert faults == []


@pytest.mark.parametrize("kind", THEIRS)
def test_every_name_of_theirs_has_one_row(kind: str):
    wanted = THEIRS[kind].split()
    assert len(set(wanted)) == len(wanted)
    listed = Counter(name for row in ROWS if row.kind == kind for name in row.names)
    missing, unknown = sorted(set(wanted) - set(listed)), sorted(set(listed) - set(wanted))
    assert missing == [], f"no row in docs/from-verl.md: {missing}"
    assert unknown == [], f"add to THEIRS, or correct: {unknown}"


def test_a_name_of_theirs_is_not_mapped_twice():
    mapped = Counter((row.kind, name) for row in ROWS for name in row.names)
    assert [name for name, number in mapped.items() if number > 1] == []


@pytest.mark.parametrize("kind", THEIRS)
def test_every_name_of_ours_exists(kind: str):
    named = [reference for row, reference in OURS if row.kind == kind]
    assert named
    gone = [name for name in named if not exists(kind, name)]
    assert gone == [], f"docs/from-verl.md names what is not there: {gone}"


def test_names_in_the_text_exist():
    # Beside the table cells: dotted names in the reasons, and keys that begin with algo.
    names = set(re.findall(r"`(torchrl_vla\.[\w.]+)`", PAGE))
    assert sorted(name for name in names if not python_name_exists(name)) == []
    keys = set(re.findall(r"`(algo\.[\w.]+)`", PAGE))
    assert keys
    families = [f"algo={path.stem}" for path in (ROOT / "conf" / "algo").glob("*.yaml")]
    gone = [k for k in keys if not any(key_exists(f"{f} {k}") for f in families)]
    assert gone == [], f"no algorithm has {gone}"


def test_commands_on_the_page_compose():
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        words = block.replace("\\\n", " ").split()
        overrides = words[words.index("launch/train.py") + 1 :]
        assert composed(*overrides)["algo"]["name"] in ("reinforce_pp", "sac")


def test_a_renamed_name_is_found():
    assert python_name_exists("torchrl_vla.learner.Learner.update")
    assert python_name_exists("torchrl_vla.learner.ParameterGroup.params")  # field, no default
    assert python_name_exists("torchrl_vla.envs.simulator.Suite.splits")  # of a protocol
    assert python_name_exists("torchrl_vla.envs.chunked.ChunkedEnv.gamma")  # constructor argument
    for gone in ("learner.Learner.step", "learnr.Learner", "learner.update", "replay.Pool"):
        assert not python_name_exists(f"torchrl_vla.{gone}")
    assert key_exists("algo=ppo algo.objective.clip_low")
    assert not key_exists("algo=sac algo.objective.clip_low")
    assert key_exists("budget.updates")  # there, though null
    assert not key_exists("budget.hours")
    for name in ("grad_norm/policy", "lr/alpha", "loss_kl", "eval/success_rate", "version"):
        assert metric_is_logged(name)
    for name in ("loss_pg", "grad_norm/polcy", "lrs/alpha", "numbers", "demonstrated"):
        assert not metric_is_logged(name)
