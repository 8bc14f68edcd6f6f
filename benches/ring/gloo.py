import sys
import time

import torch
import torch.distributed as distributed

torch.set_num_threads(1)
distributed.init_process_group("gloo")
for size in sys.argv[1].split(","):
    kib, rounds = map(int, size.split(":"))
    values = torch.ones(kib * 256)
    for _ in range(3):
        distributed.all_reduce(values.clone())
    times = torch.empty(rounds, dtype=torch.float64)
    for at in range(rounds):
        values.fill_(1)
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_reduce(values)
        times[at] = time.perf_counter() - begin
        assert values[0] == distributed.get_world_size()
    distributed.all_reduce(times, op=distributed.ReduceOp.MAX)
    if distributed.get_rank() == 0:
        print(kib, times.median().item() * 1e6, times.min().item() * 1e6, flush=True)
distributed.destroy_process_group()
