import sys
import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
for size in sys.argv[1].split(","):
    kib, rounds = map(int, size.split(":"))
    values = np.ones(kib * 256, np.float32)
    for _ in range(3):
        world.Allreduce(MPI.IN_PLACE, values.copy())
    times = np.empty(rounds)
    for at in range(rounds):
        values.fill(1)
        world.Barrier()
        begin = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, values)
        times[at] = time.perf_counter() - begin
        assert values[0] == world.Get_size()
    world.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    if world.Get_rank() == 0:
        print(kib, np.median(times) * 1e6, times.min() * 1e6, flush=True)
