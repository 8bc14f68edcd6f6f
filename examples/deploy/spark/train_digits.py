"""Trains the example `digits` under Spark, on a CSV file that Spark reads.

    target/release/digits --print-samples > digits.csv
    spark-submit train_digits.py --csv digits.csv -- target/release/digits --steps 2000

The arguments behind `--` are the command of all tasks. Paths in them are those of the executors.
"""

import argparse
import os
import shlex
import struct

from pyspark import SparkConf, SparkContext

import barrier_cluster


def record(line: str) -> bytes:
    """Returns the record of a line: the label as a number of 4 bytes, and the pixels as floats."""
    label, *pixels = line.split(",")
    return struct.pack(f"<I{len(pixels)}f", int(label), *map(float, pixels))


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--csv", required=True, help="file or URL of the samples, the label first")
    parser.add_argument("--num-ps", type=int, default=1, help="number of ps tasks (1)")
    parser.add_argument("--num-workers", type=int, default=3, help="number of workers (3)")
    parser.add_argument("--ps-args", type=shlex.split, default=[], help="arguments of ps tasks")
    parser.add_argument("--worker-args", type=shlex.split, default=[], help="arguments of workers")
    parser.add_argument("command", nargs="+", help="program and arguments of all tasks")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    configuration = SparkConf().setAppName("pushpull digits")
    # With too few slots for all tasks the job fails after half a minute, not after ten.
    configuration.setIfMissing("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
    configuration.setIfMissing("spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures", "30")
    spark = SparkContext(conf=configuration)
    spark.addPyFile(barrier_cluster.__file__)
    program, *common = arguments.command
    command = [os.path.abspath(program), *common]
    cluster = barrier_cluster.Cluster(
        num_ps=arguments.num_ps,
        num_workers=arguments.num_workers,
        ps_command=command + arguments.ps_args,
        worker_command=[*command, "--data=-", *arguments.worker_args],
    )
    records = spark.textFile(arguments.csv).map(record)
    for result in barrier_cluster.train(records, cluster):
        last_line = result.last_lines[-1] if result.last_lines else ""
        print(f"{result.name} at {result.address}, exit code {result.exit_code}: {last_line}")
    spark.stop()


if __name__ == "__main__":
    main()
