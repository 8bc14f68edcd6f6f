"""A pushpull cluster in the tasks of one Spark barrier stage, whose workers train on an RDD.

Each task of the stage starts one process and waits for it. The first tasks are ps tasks, the others
are workers. A worker gets its share of the records on its standard input.
"""

import collections
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import IO, NamedTuple

from pyspark import RDD, BarrierTaskContext

# The length that marks the end of a stream of records.
END_MARK = 0xFFFFFFFF

# The number of lines that the driver gets of each process.
LAST_LINES = 20


class Cluster(NamedTuple):
    """The number of tasks and the command of each job."""

    num_ps: int
    num_workers: int
    ps_command: list[str]
    worker_command: list[str]

    def task(self, partition: int) -> tuple[str, int]:
        """Returns job and index of the task in a partition of the stage."""
        if partition < self.num_ps:
            return "ps", partition
        return "worker", partition - self.num_ps

    def partition_of_record(self, number: int) -> int:
        """Returns the partition whose worker trains on a record."""
        return self.num_ps + number % self.num_workers


class TaskResult(NamedTuple):
    """The end of a process."""

    name: str
    address: str
    exit_code: int
    last_lines: list[str]


def train(records: RDD, cluster: Cluster) -> list[TaskResult]:
    """Runs a cluster whose workers train on the records, each of which is `bytes`.

    If a task fails, Spark ends the others and runs all of them again.
    """
    # By their numbers, so that a worker that starts again gets the same records in the same order.
    numbered = records.zipWithIndex().map(lambda pair: (pair[1], pair[0]))
    tasks = cluster.num_ps + cluster.num_workers
    sorted_records = numbered.repartitionAndSortWithinPartitions(tasks, cluster.partition_of_record)
    shares = sorted_records.values()
    results = shares.barrier().mapPartitions(lambda share: [run_task(cluster, share)])
    # Spark retries a barrier stage only if a shuffle follows it.
    return results.map(lambda result: (0, result)).partitionBy(1).values().collect()


def run_task(cluster: Cluster, share: Iterable[bytes]) -> TaskResult:
    """Runs the process of this barrier task, and feeds it if it is a worker."""
    context = BarrierTaskContext.get()
    partition = context.partitionId()
    job, index = cluster.task(partition)
    # An address, because a name may have others, at which the process would listen.
    host = socket.gethostbyname(context.getTaskInfos()[partition].address.rsplit(":", 1)[0])
    with held_port(host) as port:
        address = f"{host}:{port.getsockname()[1]}"
        addresses = gathered(context, address)
        hosts = {"ps": addresses[: cluster.num_ps], "worker": addresses[cluster.num_ps :]}
        command = [
            *(cluster.ps_command if job == "ps" else cluster.worker_command),
            # Spark kills only the Python worker of a task: the process must follow its parent.
            "--exit-with-parent",
            f"--ps_hosts={','.join(hosts['ps'])}",
            f"--worker_hosts={','.join(hosts['worker'])}",
            f"--job_name={job}",
            f"--task_index={index}",
        ]
        place = {"cluster": hosts, "task": {"type": job, "index": index}}
        process = subprocess.Popen(
            command,
            env=os.environ | {"TF_CONFIG": json.dumps(place)},
            stdin=subprocess.PIPE if job == "worker" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        name = f"{job}:{index}"
        try:
            last_lines = finish(name, process, share)
        finally:
            # It lives if the share could not be computed.
            process.kill()
            process.wait()
    return TaskResult(name, address, process.returncode, last_lines)


def held_port(host: str) -> socket.socket:
    """Returns a socket that holds a free port of this host until it is closed.

    It does not listen, so a server that sets SO_REUSEADDR can. Nobody else is given the port.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((host, 0))
    return port


def gathered(context: BarrierTaskContext, text: str) -> list[str]:
    """Exchanges texts with the other tasks. Returns those of all, by their partitions."""
    messages = context.allGather(json.dumps([context.partitionId(), text]))
    return [text for _, text in sorted(json.loads(message) for message in messages)]


def finish(name: str, process: subprocess.Popen, share: Iterable[bytes]) -> list[str]:
    """Feeds a process, and waits for its end. Returns its last lines.

    Raises a RuntimeError with these lines if the process fails, or ends before it has its share.
    """
    last_lines = collections.deque(maxlen=LAST_LINES)
    # The process could not write its lines while this thread waits for it to read.
    reader = threading.Thread(target=pass_lines_on, args=(name, process.stdout, last_lines))
    reader.start()
    is_fed = process.stdin is None or feed(share, process.stdin)
    exit_code = process.wait()
    reader.join()
    if exit_code == 0 and is_fed:
        return list(last_lines)
    when = "" if is_fed else ", before it had its share"
    fault = f"{name} ended with exit code {exit_code}{when}"
    raise RuntimeError("\n".join([fault, *last_lines]))


def pass_lines_on(name: str, output: IO[bytes], last_lines: collections.deque) -> None:
    """Copies the lines of a process to the log of the executor, and keeps the last ones."""
    for line in output:
        text = line.decode(errors="replace").rstrip("\n")
        last_lines.append(text)
        print(f"task={name} {text}", file=sys.stderr, flush=True)


def feed(share: Iterable[bytes], pipe: IO[bytes]) -> bool:
    """Writes records, each with its length, and the end mark with their number.

    Returns False if the process stops reading before.
    """
    count = 0
    try:
        with pipe:
            for record in share:
                pipe.write(struct.pack("<I", len(record)) + record)
                count += 1
            pipe.write(struct.pack("<IQ", END_MARK, count))
    except BrokenPipeError:
        return False
    return True
