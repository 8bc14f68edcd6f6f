//! Measurements on fewer processors than the machine has.

use std::io;

use super::BenchError;

/// Runs a measurement on this many of the processors of this process. Threads and processes that are
/// started meanwhile stay on them.
///
/// # Errors
/// If the process has fewer processors, and those of the measurement.
#[cfg(target_os = "linux")]
pub(crate) fn on_processors<R>(
    count: usize,
    measure: impl FnOnce() -> Result<R, BenchError>,
) -> Result<R, BenchError> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let all = sched_getaffinity(None).map_err(io::Error::from)?;
    let mut few = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu)).take(count).for_each(|cpu| few.set(cpu));
    if (few.count() as usize) < count {
        let found = all.count();
        return Err(format!("cannot measure on {count} processors: there are {found}").into());
    }
    sched_setaffinity(None, &few).map_err(io::Error::from)?;
    let measured = measure();
    sched_setaffinity(None, &all).map_err(io::Error::from)?;
    measured
}

/// Fails: this system does not let a process choose its processors.
#[cfg(not(target_os = "linux"))]
pub(crate) fn on_processors<R>(
    _: usize,
    _: impl FnOnce() -> Result<R, BenchError>,
) -> Result<R, BenchError> {
    let error = "cannot choose processors on this system";
    Err(io::Error::new(io::ErrorKind::Unsupported, error).into())
}
