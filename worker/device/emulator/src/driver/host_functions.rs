//! The thread that calls host functions.

use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

use super::shared::run_host_function;

/// The thread lives as long as the process: a library that is unloaded is not supported.
static WAITING: LazyLock<Mutex<Sender<(u64, u64)>>> = LazyLock::new(|| {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        while let Ok((stream, number)) = receiver.recv() {
            run_host_function(stream, number);
        }
    });
    Mutex::new(sender)
});

/// Has the host function called that is this work of a stream. Without this, a program that waits
/// for nothing else would make no progress.
pub(crate) fn schedule(stream: u64, number: u64) {
    let sender = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    // The thread ends only with the process.
    let _ = sender.send((stream, number));
}
