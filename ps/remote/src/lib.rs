//! Checkpoints and training data on object stores and HDFS.
//!
//! [`RemoteStorage`] keeps checkpoints at a URL: `s3://bucket/prefix`, `gs://bucket/prefix`,
//! `az://container/prefix` or `hdfs://namenode:port/path`. [`RemoteFiles`] reads other files there.
//! Each kind of storage is a feature of the crate. All calls block, so they belong on a thread that
//! may wait for a disk; the requests run on threads of the storage.
//!
//! Nothing is read from the environment: a [`RemoteOptions`] has credentials and settings. Every
//! operation ends within [`RemoteOptions::operation_timeout`]. See `docs/remote.md`. An internal
//! crate of pushpull: its API may change with any version.

#![forbid(unsafe_code)]

mod backend;
mod bucket;
mod claim;
#[cfg(feature = "cloud")]
mod cloud;
mod fault;
mod files;
#[cfg(feature = "hdfs")]
mod hdfs;
mod objects;
mod options;
mod process_mark;
mod remote_file;
mod storage;
mod store_threads;
mod upload;
mod url;

pub use fault::{RemoteError, RemoteFault};
pub use files::{RemoteEntry, RemoteFiles, RemoteInput};
pub use options::RemoteOptions;
pub use storage::RemoteStorage;
pub use url::{RemoteScheme, RemoteUrl};
