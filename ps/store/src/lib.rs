//! The memory of a parameter server: the variables and optimizer slots of a shard in mapped files,
//! changed only by commits that a killed process cannot tear.
//!
//! From the bottom up:
//!
//! - [`arena`]: mapped files, and blocks that readers can pin.
//! - [`commit`]: the transactions that change a shard's durable words.
//! - [`undo`]: the old contents of rows that are changed in place.
//! - [`table`]: embedding tables that grow.
//! - [`store`]: variables and slots in blocks; it owns the tables and changes them together with
//!   the blocks.
//!
//! Only `pushpull-ps` uses this crate. Its API may change with every version.

pub mod arena;
mod cache;
pub mod change;
pub mod commit;
mod error;
pub mod layout;
#[cfg(any(test, feature = "measure"))]
#[doc(hidden)]
pub mod measure;
pub mod planted;
pub mod store;
pub mod table;
#[cfg(any(test, fuzzing, all(feature = "simulation", debug_assertions)))]
pub mod testing;
pub mod undo;
#[cfg(not(any(test, fuzzing, all(feature = "simulation", debug_assertions))))]
mod without_testing;

pub use error::StorageError;
#[cfg(not(any(test, fuzzing, all(feature = "simulation", debug_assertions))))]
use without_testing as testing;
