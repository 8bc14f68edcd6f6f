//! A full file system: no file gets more memory.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// The number of refused requests for memory; `None` if the file system is not full.
    static REFUSED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The file system of a thread while it is full. It has space again when this is dropped.
#[derive(Debug)]
pub struct FullDisk(PhantomData<*const ()>);

impl FullDisk {
    /// Fills the file system of this thread.
    pub fn fill() -> FullDisk {
        REFUSED.set(Some(0));
        FullDisk(PhantomData)
    }

    /// Returns the number of refused requests for memory.
    pub fn refused(&self) -> usize {
        REFUSED.get().unwrap_or(0)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        REFUSED.set(None);
    }
}

/// Returns an error if the file system is full.
pub(crate) fn check() -> std::io::Result<()> {
    let Some(refused) = REFUSED.get() else { return Ok(()) };
    REFUSED.set(Some(refused + 1));
    Err(std::io::ErrorKind::StorageFull.into())
}
