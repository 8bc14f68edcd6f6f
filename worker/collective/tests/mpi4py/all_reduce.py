"""Sums of MPI over inputs that `../mpi4py.rs` makes too.

    mpiexec -n N python all_reduce.py FOLDER LENGTH...

Rank 0 writes each sum to FOLDER/TYPE-SIGNS-LENGTH, as raw elements.
"""

import pathlib
import sys

import numpy
from mpi4py import MPI

GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)


def inputs(rank, length, precision, signs):
    """The elements of a rank: `precision` random bits, scaled by a power of two."""
    bits = numpy.arange(length, dtype=numpy.uint64) + numpy.uint64((rank << 32) + 1)
    bits *= GOLDEN
    bits = (bits ^ (bits >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    bits ^= bits >> numpy.uint64(31)
    mantissa = (bits >> numpy.uint64(64 - precision)).astype(numpy.float64)
    exponent = (bits & numpy.uint64(7)).astype(numpy.int32) - precision
    values = numpy.ldexp(mantissa, exponent)
    if signs == "mixed":
        values[bits & numpy.uint64(8) != 0] *= -1
    return values


def main():
    folder = pathlib.Path(sys.argv[1])
    world = MPI.COMM_WORLD
    for name, kind, precision in [("f32", numpy.float32, 24), ("f64", numpy.float64, 53)]:
        for signs in ["positive", "mixed"]:
            for length in map(int, sys.argv[2:]):
                own = inputs(world.Get_rank(), length, precision, signs).astype(kind)
                total = numpy.empty_like(own)
                world.Allreduce(own, total, op=MPI.SUM)
                if world.Get_rank() == 0:
                    (folder / f"{name}-{signs}-{length}").write_bytes(total.tobytes())
    if world.Get_rank() == 0:
        print(MPI.Get_library_version().split("\n")[0].strip())


main()
