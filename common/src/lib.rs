//! The vocabulary that servers and workers share: cluster specs, variables, placement, codecs and
//! the wire protocol.
//!
//! This crate is pure: no socket, thread, clock, random source or unsafe code. The runtime, the
//! tests and the fuzzers therefore drive exactly the same code.

#![forbid(unsafe_code)]

pub mod access;
pub mod byte_size;
pub mod call_digest;
pub mod catalogue;
pub mod cluster;
pub mod codec;
pub mod data_set;
pub mod device;
pub mod effect_window;
pub mod error;
pub mod file_kind;
pub mod finite;
pub mod identity;
pub mod ids;
pub mod initializer;
pub mod launch;
pub mod local_path;
pub mod names;
pub mod panic_message;
pub mod partition;
pub mod peer_origin;
pub mod permissions;
pub mod placement;
pub mod protocol;
pub mod read_at;
pub mod record_head;
pub mod regular_file;
pub mod rounding;
pub mod rows;
pub mod shared_values;
pub mod status;
pub mod stored_stream;
pub mod table;
pub mod task_registry;
pub mod tensor;
pub mod variable;
