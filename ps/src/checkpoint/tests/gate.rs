//! A storage whose shard files can be read only when a test permits it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_checkpoint::{CheckpointStorage, ReadFile, StorageFault, WriteFile};

/// The limit of every wait; a longer one means that the test hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub(crate) struct Gate {
    storage: Arc<dyn CheckpointStorage>,
    shared: Arc<(Mutex<GateState>, Condvar)>,
}

#[derive(Debug, Default)]
struct GateState {
    /// The number of reads that may pass; `None` while the gate is open.
    permits: Option<usize>,
    waiting: usize,
    passed: usize,
}

impl Gate {
    /// Creates an open gate in front of a storage.
    pub(crate) fn new(storage: Arc<dyn CheckpointStorage>) -> Gate {
        Gate { storage, shared: Arc::default() }
    }

    /// Lets `reads` more reads pass, and blocks the others.
    pub(crate) fn let_through(&self, reads: usize) {
        self.state().permits = Some(reads);
        self.shared.1.notify_all();
    }

    pub(crate) fn open_all(&self) {
        self.state().permits = None;
        self.shared.1.notify_all();
    }

    /// Returns once the gate blocks a read.
    pub(crate) fn wait_for_reader(&self) {
        drop(self.wait(|state| state.waiting == 0 || state.permits != Some(0)));
    }

    /// Returns the number of reads that have passed.
    pub(crate) fn passed(&self) -> usize {
        self.state().passed
    }

    fn pass(&self) {
        self.state().waiting += 1;
        self.shared.1.notify_all();
        let mut state = self.wait(|state| state.permits == Some(0));
        state.waiting -= 1;
        state.passed += 1;
        if let Some(permits) = &mut state.permits {
            *permits -= 1;
        }
    }

    fn wait(&self, on: impl Fn(&GateState) -> bool) -> MutexGuard<'_, GateState> {
        let waited = self.shared.1.wait_timeout_while(self.state(), TIMEOUT, |state| on(state));
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "the gate timed out: {state:?}");
        state
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CheckpointStorage for Gate {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        self.storage.list(folder)
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.storage.create_folder(folder)
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        self.storage.create(folder, file)
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let opened = self.storage.open(folder, file)?;
        let gate = file.starts_with("shard-").then(|| self.clone());
        Ok(Box::new(GatedFile { gate, file: opened }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        self.storage.rename_folder(from, to)
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.storage.remove_folder(folder)
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        self.storage.sync(folder)
    }
}

#[derive(Debug)]
struct GatedFile {
    gate: Option<Gate>,
    file: Box<dyn ReadFile>,
}

impl ReadFile for GatedFile {
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        self.file.read(offset, out)
    }
}
