"""A private SLURM cluster of several virtual nodes on this machine, on loopback only."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
APT = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MessageTimeout=10
MinJobAge=300
JobRequeue=1
UnkillableStepTimeout=20
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
# cred_expire: a requeued job waits for as long (120 s by default, 5 is the least).


def missing() -> str | None:
    """Say why there can be no cluster here, or return ``None``."""
    absent = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)}): {APT}"
    return None if os.geteuid() == 0 else "the virtual SLURM cluster needs root"


def wait_until(is_so: Callable[[], object], what: str, seconds: float = 600) -> None:
    """Poll; a failure names what never came."""
    limit = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > limit:
            raise TimeoutError(f"after {seconds:.0f} s still not: {what}")
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """Return the first of ``count`` neighbouring ports that nobody listens on."""
    for first in range(16000 + os.getpid() % 1000 * 4, 32000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports between 16000 and 32000")


class Cluster:
    """munged, slurmctld and one slurmd per virtual node; ``with`` starts and stops them."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"n{i + 1}" for i in range(nodes)]
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def __enter__(self) -> "Cluster":
        folder, host = self.folder, socket.gethostname().split(".")[0]
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        for name, mode in (("munge", 0o700), ("state", 0o700)):
            (folder / name).mkdir(mode=mode)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        first = free_ports(len(self.nodes) + 1)
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={first + 1 + i} CPUs=8 "
            "RealMemory=4000 State=UNKNOWN"
            for i, name in enumerate(self.nodes)
        ]
        text = CONFIGURATION.format(folder=folder, host=host, port=first, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        self.run(
            "munged", f"--socket={folder}/munge.sock", f"--key-file={key}", "--num-threads=2",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        )  # fmt: skip
        try:
            self.run("slurmctld", "-c")
            for name in self.nodes:
                (folder / f"spool.{name}").mkdir()
                self.start_node(name)
            wait_until(lambda: self.idle() == set(self.nodes), "all nodes are idle", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid("slurmctld"):
            # KILL first: then no trap can put a job back into the queue
            for way in (("--full", "--signal=KILL"), ()):
                self.run("scancel", *way, *self.run("squeue", "-h", "-o", "%A").split())
            wait_until(lambda: not self.run("squeue", "-h"), "the queue is empty", 60)
        pids = [self.pid(f"slurmd.{name}") for name in self.nodes] + [self.pid("slurmctld")]
        for pid in filter(None, [*pids, self.pid("munged")]):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(alive, filter(None, pids))), "daemons are gone", 60)

    def run(self, *command: str, **environment: str) -> str:
        """Run a command with this cluster's configuration; return what it printed."""
        if command[0] == "scancel" and all(word.startswith("-") for word in command[1:]):
            return ""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        self.run("slurmd", "-N", name)

    def idle(self) -> set[str]:
        return set(self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split())

    def pid(self, daemon: str) -> int | None:
        """Return a daemon's process id; ``None`` when it is not running."""
        file = self.folder / f"{daemon}.pid"
        pid = int(file.read_text()) if file.exists() else None
        return pid if pid and alive(pid) else None

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says about a job."""
        text = self.run("scontrol", "-o", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
