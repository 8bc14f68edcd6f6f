//! The one driver of the process, its lock, and the entrance of every function.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use super::code::{DriverErrorCode, DriverResult};
use super::context::is_in_host_function;
use super::state::{DriverState, Reached, StreamPosition};

/// A library with a C interface has one state for its process.
static STATE: LazyLock<Mutex<DriverState>> =
    LazyLock::new(|| Mutex::new(DriverState::from_environment()));
/// Notified when a host function has returned.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, DriverState> {
    // A panic is reported as an error code, and leaves a state that a reset makes good.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function on the state, for the control interface.
pub(crate) fn with_state<T>(function: impl FnOnce(&mut DriverState) -> T) -> T {
    function(&mut lock())
}

/// The entrance of a function of the driver that does not wait.
pub(crate) fn call(name: &str, work: impl FnOnce(&mut DriverState) -> DriverResult) -> u32 {
    guarded(|| {
        let mut state = lock();
        enter(&mut state, name)?;
        work(&mut state)
    })
}

/// Enters a driver function that waits for streams. `work` returns the context, and the positions
/// to wait for.
pub(crate) fn call_and_wait(
    name: &str,
    work: impl FnOnce(&mut DriverState) -> DriverResult<(u64, Vec<StreamPosition>)>,
) -> u32 {
    guarded(|| {
        let mut state = lock();
        enter(&mut state, name)?;
        let (context, targets) = work(&mut state)?;
        drop(wait(state, &targets));
        lock().sticky(context)
    })
}

/// Does the work of streams up to some targets. Waits while host functions run.
fn wait(
    mut state: MutexGuard<'static, DriverState>,
    targets: &[StreamPosition],
) -> MutexGuard<'static, DriverState> {
    for &target in targets {
        loop {
            match state.advance(target) {
                Reached::Yes => {
                    state.host_knows(target);
                    break;
                }
                Reached::NotYet => {}
                Reached::HostFunction => {
                    state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
    state
}

/// Does the work before a host function, and calls it. The thread of host functions runs this.
pub(crate) fn run_host_function(stream: u64, number: u64) {
    let state = lock();
    let mut state = wait(state, &[(stream, number - 1)]);
    let Some((function, argument)) = state.begin_host_function(stream, number) else { return };
    drop(state);
    super::context::in_host_function(|| {
        // SAFETY: the host has handed the function over with its argument, to be called once.
        unsafe { function(argument as *mut std::ffi::c_void) }
    });
    lock().end_host_function(stream);
    CHANGED.notify_all();
}

fn enter(state: &mut DriverState, name: &str) -> DriverResult {
    if is_in_host_function() {
        state.fault(format!("{name} called by a host function"));
        return Err(DriverErrorCode::NOT_PERMITTED);
    }
    state.calls.enter(name)?;
    if !state.is_initialized && !matches!(name, "cuInit" | "cuDriverGetVersion") {
        return Err(DriverErrorCode::NOT_INITIALIZED);
    }
    Ok(())
}

/// Turns a result into its code, and a panic into an unknown error.
pub(crate) fn guarded(work: impl FnOnce() -> DriverResult) -> u32 {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => DriverErrorCode::UNKNOWN.0,
    }
}
