//! [`Turn`] and [`DriverTurn`]: the driver for one test at a time.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use crate::Leaks;
use crate::control::{Control, Library};

/// The environment variable that names the driver of the tests: with `installed`, tests that need
/// nothing of the emulator run on the driver and the devices of this machine, and the others are
/// skipped.
pub const DRIVER: &str = "PUSHPULL_TEST_DRIVER";

/// A process has one driver, and the emulator counts what all its threads do.
static TURNS: Mutex<()> = Mutex::new(());

/// The emulator for one test at a time. A test that ends with a fault or a leak fails.
#[derive(Debug)]
pub struct Turn {
    control: Control,
    expects_faults: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for the turn of this test, and resets the emulator. With the installed driver, prints
    /// that the test is skipped and returns `None`.
    ///
    /// # Panics
    /// Those of [`Library::open`].
    pub fn start() -> Option<Turn> {
        if uses_installed_driver() {
            let test = thread::current().name().unwrap_or("a test").to_owned();
            println!("SKIPPED: {test} needs the emulated driver");
            return None;
        }
        Some(Turn::emulated(TURNS.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn emulated(turn: MutexGuard<'static, ()>) -> Turn {
        static CONTROL: OnceLock<Control> = OnceLock::new();
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

/// The driver that [`DRIVER`] names, for one test at a time.
#[derive(Debug)]
pub enum DriverTurn {
    /// The emulator.
    Emulated(Turn),
    /// The driver of this machine.
    Installed(InstalledTurn),
}

/// A turn with the driver of this machine.
#[derive(Debug)]
pub struct InstalledTurn {
    _turn: MutexGuard<'static, ()>,
}

impl DriverTurn {
    /// Waits for the turn of this test.
    ///
    /// # Panics
    /// Those of [`Library::open`].
    pub fn start() -> DriverTurn {
        let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        match uses_installed_driver() {
            true => DriverTurn::Installed(InstalledTurn { _turn: turn }),
            false => DriverTurn::Emulated(Turn::emulated(turn)),
        }
    }

    /// The emulator, for what only it tells.
    pub fn emulator(&self) -> Option<&Turn> {
        match self {
            DriverTurn::Emulated(turn) => Some(turn),
            DriverTurn::Installed(_) => None,
        }
    }
}

fn uses_installed_driver() -> bool {
    match std::env::var_os(DRIVER) {
        None => false,
        Some(name) if name == "installed" => true,
        Some(name) => panic!("{DRIVER} is {name:?}: expected installed, or nothing"),
    }
}
