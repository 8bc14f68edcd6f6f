//! [`Turn`]: the emulator for one test at a time.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use crate::Leaks;
use crate::control::{Control, Library};

/// The emulator for one test at a time, since a process has one driver. A test that ends with a fault
/// or a leak fails.
#[derive(Debug)]
pub struct Turn {
    control: Control,
    expects_faults: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for the turn of this test, and resets the emulator.
    ///
    /// # Panics
    /// Those of [`Library::open`].
    pub fn start() -> Turn {
        static TURNS: Mutex<()> = Mutex::new(());
        static CONTROL: OnceLock<Control> = OnceLock::new();
        let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        let control = *CONTROL.get_or_init(|| Library::open().control());
        control.reset();
        Turn { control, expects_faults: false, _turn: turn }
    }

    /// Lets the test end with faults.
    pub fn expects_faults(mut self) -> Turn {
        self.expects_faults = true;
        self
    }

    /// Waits until the host has given everything back: other threads may hold something for a short
    /// time.
    ///
    /// # Panics
    /// If it has not after two seconds.
    #[track_caller]
    pub fn await_no_leaks(&self) {
        for _ in 0..2_000 {
            if self.leaks() == Leaks::default() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.leaks(), Leaks::default());
    }
}

impl Deref for Turn {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        self.await_no_leaks();
        let faults = self.faults();
        assert!(self.expects_faults || faults.is_empty(), "{faults:?}");
    }
}
