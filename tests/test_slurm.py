"""The job scripts on a real slurmctld with virtual nodes: stop, requeue, resume, cancel, fail."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from slurm_cluster import ROOT, Cluster, alive, missing, wait_until

SCRIPTS = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))
ENDLESS = ("endless=yes",)
"""The first attempt goes on until it is stopped."""
needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Job:
    """A training job in its own run folder."""

    def __init__(
        self, cluster: Cluster, folder: Path, script: str, *options: str,
        words: tuple[str, ...] = (), steps: int | str | None = None,
        program: str = "tests/slurm_trainer.py", **environment: str,
    ):  # fmt: skip
        self.cluster, self.folder = cluster, folder
        words = words if steps is None else (f"steps={steps}", *words)
        self.number = cluster.run(
            "sbatch", "--parsable", "--cpus-per-task=1", "--time=20", f"--output={folder}.out",
            *options, f"launch/slurm/{script}.sbatch", *words,
            RUN_DIR=str(folder), PROGRAM=program, **environment,
        )  # fmt: skip

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    def events(self, kind: str) -> list[dict]:
        file = self.folder / "events.jsonl"
        rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [row for row in rows if row["event"] == kind]

    def wait(self, what: str, is_so, seconds: float = 600) -> None:
        try:
            wait_until(is_so, what, seconds)
        except TimeoutError as error:
            log = Path(f"{self.folder}.out")
            steps = [path.read_text()[-3000:] for path in self.folder.glob("slurm/*/*.log")]
            raise TimeoutError(
                f"{error}\n{log.read_text() if log.exists() else ''}{steps}"
            ) from None

    def wait_for_ranks(self, number: int) -> None:
        self.wait(f"{number} ranks have started", lambda: len(self.events("start")) >= number)

    def wait_for_end(self, seconds: float = 600) -> None:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait("the job has ended", lambda: self.state in ends, seconds)


@pytest.fixture(scope="module")
def cluster():
    # not pytest's folder, which is private: munge wants a path that everybody may enter
    with TemporaryDirectory() as folder, Cluster(Path(folder), nodes=3) as started:
        yield started


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_dry_run_prints_the_command_and_starts_nothing(script: Path, tmp_path: Path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        [script, "--dry-run", "algo=sac", "env.words=[a, b]"],
        env=clean | {"RUN_DIR": str(tmp_path / "run"), "CONTAINER": "inside image.sif"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun ")
    assert " inside image.sif torchrun --nnodes=1 " in done.stdout
    assert f"launch/train.py run_dir={tmp_path}/run resume=auto" in done.stdout
    assert done.stdout.strip().endswith(r"algo=sac env.words=\[a\,\ b\]")
    assert list(tmp_path.iterdir()) == []
    # outside a job nothing else is possible
    done = subprocess.run([script], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no job: use sbatch" in done.stderr


@needs_slurm
def test_stop_before_the_limit_requeue_and_resume(cluster: Cluster, tmp_path: Path):
    job = Job(cluster, tmp_path / "run", "many_nodes", words=ENDLESS, steps=40)
    job.wait_for_ranks(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1 sends
    job.wait_for_end()
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    # both ranks stopped after the same step, and both went on from there
    (step,) = {row["step"] for row in job.events("stopped")}
    starts = [(row["attempt"], row["rank"], row["step"]) for row in job.events("start")]
    first, second = f"{job.number}.0", f"{job.number}.1"
    assert sorted(starts) == [(first, 0, 0), (first, 1, 0), (second, 0, step), (second, 1, step)]
    assert {row["step"] for row in job.events("done")} == {max(step, 40)}
    assert len({row["node"] for row in job.events("done")}) == 2
    # one log per rank and attempt
    logs = list(job.folder.glob("slurm/*/ranks/*/attempt_0/*/stdout.log"))
    said = sorted(re.findall(r"rank \d of 2", "".join(log.read_text() for log in logs)))
    assert said == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2


@needs_slurm
@pytest.mark.slow
def test_learners_and_actors_in_one_job(cluster: Cluster, tmp_path: Path):
    job = Job(
        cluster, tmp_path / "run", "learners_and_actors", "--nodes=2", ":", "--ntasks-per-node=3",
        steps=40, words=("meet=3", *ENDLESS), ACTOR="python tests/slurm_actor.py",
    )  # fmt: skip
    job.wait("three actors have joined", lambda: len(job.events("actor")) >= 3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_end()
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    # in both attempts: two ranks, and on the third node an actor for rank 0, 1 and 0 again
    nodes = {row["node"] for row in job.events("start")}
    (away,) = set(cluster.nodes) - nodes
    for attempt in ("0", "1"):
        came = [row for row in job.events("actor") if row["attempt"] == f"{job.number}.{attempt}"]
        assert sorted((row["rank"], row["name"]) for row in came) == [
            (0, f"{away}-0"), (0, f"{away}-2"), (1, f"{away}-1"),
        ]  # fmt: skip
        assert {(row["mode"], row["places"]) for row in came} == {("0o600", "2")}
    secrets = [path.read_text() for path in job.folder.glob("slurm/*/secret")]
    assert len(set(secrets)) == 2
    assert all(len(secret) == 64 for secret in secrets)
    # both components are over, and nobody is left
    wait_until(lambda: cluster.idle() == set(cluster.nodes), "all nodes are idle", 60)
    wait_until(lambda: not ranks_of(job), "no process is left", 60)


REAL = (
    "algo=sac", "budget.minutes=null", "budget.env_steps=null", "budget.updates=2000",
    "evaluation.episodes=2", "evaluation.final_episodes=2", "evaluation.num_envs=2",
    "evaluation.videos=0", "evaluation.every_minutes=1e6", "logger.display=false",
    "algo.actors.envs_per_worker=2", "algo.actors.decisions_per_env=4",
    "algo.pace.slack_decisions=32", "algo.pace.publish_updates=20", "algo.pace.warm_up_updates=0",
    "algo.replay.min_decisions=16", "algo.replay.demonstration_episodes=2",
    "algo.replay.batch_size=16",
)  # fmt: skip


@needs_slurm
@pytest.mark.slow
def test_the_real_programs_as_learner_and_actors(cluster: Cluster, tmp_path: Path):
    job = Job(
        cluster, tmp_path / "run", "learners_and_actors", ":", "--nodes=2", "--ntasks-per-node=1",
        program="launch/train.py", words=REAL,
    )  # fmt: skip

    def rows() -> list[dict]:
        file = job.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    job.wait(
        "both actors have joined", lambda: rows() and rows()[-1].get("actors/remote") == 2, 900
    )
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait("it is requeued", lambda: job.restarts == 1, 900)
    (cursor,) = {row["update"] for row in rows()[-1:]}
    assert 0 < cursor < 2000
    job.wait_for_end(900)
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    updates = [row["update"] for row in rows()]
    assert updates == sorted(set(updates))
    assert updates[-1] == 2000
    board = json.loads((job.folder / "actors" / "rank-0" / "remote.json").read_text())
    assert (board["ending"], board["places"]) == ("over", 2)
    said = (job.folder / "slurm" / f"{job.number}.1" / "actors.log").read_text()
    assert len(re.findall(r"n\d-[01] delivered [1-9]\d* rows", said)) == 2
    wait_until(lambda: cluster.idle() == set(cluster.nodes), "all nodes are idle", 60)


@needs_slurm
@pytest.mark.slow
def test_preempted_with_grace(cluster: Cluster, tmp_path: Path):
    job = Job(cluster, tmp_path / "run", "many_nodes", "--nodes=3", words=ENDLESS, steps=60)
    job.wait_for_ranks(3)
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 2",
    )  # fmt: skip
    job.wait_for_end()
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert cluster.job(urgent)["JobState"] == "COMPLETED"
    (step,) = {row["step"] for row in job.events("stopped")}
    again = [row["step"] for row in job.events("start") if row["attempt"].endswith(".1")]
    assert again == [step] * 3


@needs_slurm
@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tmp_path: Path):
    job = Job(cluster, tmp_path / "run", "one_node", steps=600)
    job.wait_for_ranks(1)
    cluster.run("scancel", job.number)
    job.wait_for_end()
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    wait_until(lambda: not ranks_of(job), "no rank is left", 60)
    # what it did is saved all the same
    assert json.loads((job.folder / "checkpoint.json").read_text()) > 0


def ranks_of(job: Job) -> dict[int, str]:
    """Return the living processes of a job's ranks and their launchers, with their nodes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = dict(word.partition("=")[::2] for word in path.read_text().split("\0"))
        except (OSError, UnicodeDecodeError):
            continue
        pid = int(path.parent.name)
        if words.get("SLURM_JOB_ID") == job.number and "SLURM_STEP_ID" in words and alive(pid):
            found[pid] = words["SLURMD_NODENAME"]
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@needs_slurm
@pytest.mark.slow
def test_two_jobs_on_one_node_do_not_clash(cluster: Cluster, tmp_path: Path):
    jobs = [
        Job(cluster, tmp_path / f"run{i}", "one_node", "--nodelist=n1", steps=30) for i in range(2)
    ]
    for job in jobs:
        job.wait_for_end()
        assert (job.state, job.restarts) == ("COMPLETED", 0)
        assert [row["step"] for row in job.events("done")] == [30]
    ports = [re.search(r"port (\d+)", Path(f"{job.folder}.out").read_text())[1] for job in jobs]
    assert len(set(ports)) == 2


@needs_slurm
@pytest.mark.slow
def test_a_failed_run_is_not_requeued(cluster: Cluster, tmp_path: Path):
    job = Job(cluster, tmp_path / "run", "one_node", steps="many")
    job.wait_for_end()
    assert (job.state, job.restarts) == ("FAILED", 0)
    assert "ValueError" in next(job.folder.glob("slurm/*/all.log")).read_text()


@needs_slurm
@pytest.mark.slow
def test_a_node_fails_and_a_spare_one_takes_over(cluster: Cluster, tmp_path: Path):
    job = Job(cluster, tmp_path / "run", "many_nodes", steps=400)
    job.wait_for_ranks(2)
    job.wait("a save", lambda: (job.folder / "checkpoint.json").exists())
    first = cluster.job(job.number)["BatchHost"]
    (lost,) = {row["node"] for row in job.events("start")} - {first}
    # it loses its power: the daemon, the step and its processes are gone at once
    there = [pid for pid, node in ranks_of(job).items() if node == lost]
    steps = {parent(pid) for pid in there} - {1}
    steps = [pid for pid in steps if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstep")]
    assert len(steps) == 1
    for pid in [cluster.pid(f"slurmd.{lost}"), *steps, *there]:
        os.kill(pid, signal.SIGKILL)
    saved = json.loads((job.folder / "checkpoint.json").read_text())
    job.wait_for_ranks(4)
    again = [row for row in job.events("start") if row["attempt"].endswith(".1")]
    assert {row["node"] for row in again} == set(cluster.nodes) - {lost}
    assert all(row["step"] >= saved > 0 for row in again)
    cluster.run("scancel", job.number)
    job.wait_for_end()
    cluster.start_node(lost)
    wait_until(lambda: cluster.idle() == set(cluster.nodes), f"{lost} is back", 60)


def test_the_early_signal_leaves_time_to_save():
    # the header of every script asks for the early signal that the rest is built on
    for script in SCRIPTS:
        text = script.read_text()
        assert "--signal=B:USR1@180" in text
        assert "--requeue --open-mode=append" in text
    seconds = int(re.search(r"SAVE_SECONDS:=(\d+)", (ROOT / "launch/slurm/job.sh").read_text())[1])
    assert seconds < 180
