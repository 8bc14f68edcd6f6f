//! [`ReadAt`]: a file or an object whose bytes are read at any offset.

use std::fmt::Debug;
use std::io;

/// Bytes of a known length that do not change, such as an object of an object store.
///
/// Several threads may read at the same time.
pub trait ReadAt: Debug + Send + Sync {
    /// The path or the URL, for errors.
    fn name(&self) -> &str;

    /// The length in bytes.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// There are fewer bytes, or they cannot be read.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
}
