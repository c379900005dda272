"""A Slurm of two nodes on this machine: munged, slurmctld and a slurmd for each node.

Everything lies in one folder, on ports of its own; a Slurm that runs here already is not touched.
Debian and Ubuntu: ``apt-get install slurm-wlm munge``.
"""

import getpass
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

__all__ = ["Cluster", "missing"]

NODES = ("n1", "n2")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired, 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=30
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not _find(name)]


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """Started on entering the context; all of it is ended on leaving.

    Args:
        folder: an empty one that only this user can enter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = _free_ports(len(NODES) + 1)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        text = _CONFIGURATION.format(
            folder=self.folder, user=getpass.getuser(), controller=ports[0], nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(text)
        munge = {
            name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed", "key")
        }
        try:
            # --force: the folder's parent, /tmp, can be written by all, with the sticky bit.
            self._daemon(
                *("munged", "--force", "--key-file", str(munge["key"])),
                *("--socket", str(munge["socket"]), "--pid-file", str(munge["pid"])),
                *("--log-file", str(munge["log"]), "--seed-file", str(munge["seed"])),
            )
            self._daemon("slurmctld", "-c")
            for name in NODES:
                self._daemon("slurmd", "-c", "-N", name)
            self._wait_until_idle()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Run one of Slurm's commands and return what it prints.

        Raises:
            RuntimeError: it failed.
        """
        result = subprocess.run(
            command,
            env={**(os.environ if env is None else env), **self.variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if result.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {result.stderr}")
        return result.stdout

    def job(self, number: int) -> dict[str, str]:
        """What ``scontrol show job`` knows of a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self, number: int) -> list[psutil.Process]:
        """All processes of a job, on all nodes."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") == str(number):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _daemon(self, name: str, *arguments: str) -> None:
        program = _find(name)
        assert program is not None
        result = subprocess.run(
            [program, *arguments],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if result.returncode:
            raise RuntimeError(f"{name} does not start: {result.stdout}{result.stderr}")

    def _wait_until_idle(self) -> None:
        for _ in range(120):
            if self.run("sinfo", "--noheader", "--format=%T %D").split() == [
                "idle",
                str(len(NODES)),
            ]:
                return
            time.sleep(0.5)
        logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("slurm*.log"))
        raise RuntimeError(f"the nodes do not come up:\n{logs}")

    def _end(self) -> None:
        """Jobs first, the daemons in the reverse order, each by its own pid file."""
        if (self.folder / "slurmctld.pid").exists():
            subprocess.run(
                ["scancel", "--user", getpass.getuser()],
                env={**os.environ, **self.variables},
                capture_output=True,
                check=False,
            )
            _wait(lambda: self.run("squeue", "--noheader") == "", seconds=60)
        names = [*(f"slurmd-{name}.pid" for name in NODES), "slurmctld.pid", "munge.pid"]
        ended = [pid for name in names if (pid := _read_pid(self.folder / name)) is not None]
        for pid in ended:
            os.kill(pid, signal.SIGTERM)
        alive = [psutil.Process(pid) for pid in ended if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(alive, timeout=20)
        for process in alive:
            process.kill()


def _read_pid(path: Path) -> int | None:
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return None
    return pid if psutil.pid_exists(pid) else None


def _free_ports(count: int) -> Sequence[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("localhost", 0))
        return [int(each.getsockname()[1]) for each in held]
    finally:
        for each in held:
            each.close()


def _wait(condition: Callable[[], bool], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.5)
    return False
