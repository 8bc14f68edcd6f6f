//! [`TestSource`]: a source whose `get` does what a test says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::data::{Source, SourceError};

/// The function by which a source reads a sample.
type Get = dyn Fn(u64) -> Result<u64, SourceError> + Send + Sync;

/// A source of `len` samples, each its index unless `get` says otherwise.
#[derive(Clone)]
pub(super) struct TestSource {
    len: Arc<AtomicU64>,
    get: Arc<Get>,
}

impl TestSource {
    pub(super) fn new(
        len: u64,
        get: impl Fn(u64) -> Result<u64, SourceError> + Send + Sync + 'static,
    ) -> TestSource {
        TestSource { len: Arc::new(AtomicU64::new(len)), get: Arc::new(get) }
    }

    pub(super) fn set_len(&self, len: u64) {
        self.len.store(len, Ordering::SeqCst);
    }
}

impl Source for TestSource {
    type Sample = u64;

    fn name(&self) -> &str {
        "test"
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::SeqCst)
    }

    fn get(&self, index: u64) -> Result<u64, SourceError> {
        (self.get)(index)
    }
}
