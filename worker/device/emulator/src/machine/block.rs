//! Runs the threads of a block from barrier to barrier.

use super::execute::Environment;
use super::fault::DeviceFaultKind;
use super::thread::{SchedulingState, Thread};
use super::warp;
use crate::ptx::{BarrierKind, PtxOperation};

/// Runs the threads of a block to their end. A fault comes with the thread that had it.
pub(crate) fn run(
    environment: &mut Environment<'_>,
    threads: &mut [Thread],
) -> Result<(), (usize, DeviceFaultKind)> {
    loop {
        for first in (0..threads.len()).step_by(32) {
            let end = threads.len().min(first + 32);
            run_warp(environment, &mut threads[first..end])
                .map_err(|(lane, kind)| (first + lane, kind))?;
        }
        if threads.iter().all(|thread| thread.state == SchedulingState::Exited) {
            return Ok(());
        }
        pass_barrier(environment, threads)?;
    }
}

/// Runs the lanes of a warp until all have ended or wait at a barrier of the block.
fn run_warp(
    environment: &mut Environment<'_>,
    warp: &mut [Thread],
) -> Result<(), (usize, DeviceFaultKind)> {
    loop {
        for (lane, thread) in warp.iter_mut().enumerate() {
            environment.run(thread).map_err(|kind| (lane, kind))?;
        }
        let Some(waiting) = warp.iter().position(|thread| thread.state == SchedulingState::AtWarp)
        else {
            return Ok(());
        };
        let program = environment.program;
        if !warp::resolve(program, warp) {
            return Err((waiting, warp::stuck(program, warp, waiting)));
        }
    }
}

/// Lets the threads pass a barrier that all of them wait at.
fn pass_barrier(
    environment: &mut Environment<'_>,
    threads: &mut [Thread],
) -> Result<(), (usize, DeviceFaultKind)> {
    let first =
        threads.iter().position(|thread| thread.state == SchedulingState::AtBarrier).unwrap_or(0);
    let place = (threads[first].function, threads[first].at);
    let waiting = threads.iter().filter(|thread| thread.state == SchedulingState::AtBarrier);
    let here = waiting.filter(|thread| (thread.function, thread.at) == place).count();
    let exited = threads.iter().filter(|thread| thread.state == SchedulingState::Exited).count();
    if here < threads.len() {
        let elsewhere = threads.len() - here - exited;
        return Err((
            first,
            DeviceFaultKind::DivergentBarrier { waiting: here, exited, elsewhere },
        ));
    }
    let program = environment.program;
    let operation = &program.functions[place.0].instructions[place.1].operation;
    let &PtxOperation::Barrier { kind, d, a, negated } = operation else { return Ok(()) };
    let holds = threads.iter().filter(|thread| (thread.get(a) & 1 == 1) != negated).count();
    let value = match kind {
        BarrierKind::Synchronize => None,
        BarrierKind::Count => Some(holds as u64),
        BarrierKind::All => Some(u64::from(holds == threads.len())),
        BarrierKind::Any => Some(u64::from(holds > 0)),
    };
    for thread in threads {
        if let Some(value) = value {
            thread.set(d, value);
        }
        thread.state = SchedulingState::Ready;
        thread.at += 1;
        thread.warp_epoch = 0;
    }
    environment.epoch += 1;
    Ok(())
}
