//! The parameter server of pushpull: shards over memory-mapped arenas, and the runtime that serves
//! them.
//!
//! ```
//! use pushpull_common::cluster::ClusterSpec;
//! use pushpull_common::ids::TaskId;
//! use pushpull_ps::{Adam, Ps, PsConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = Ps::listen("127.0.0.1:0").await?;
//! let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build()?;
//! let ps = listener.start(PsConfig::new(cluster, TaskId::ps(0), Adam::default()))?;
//! let handle = ps.handle();
//! # handle.stop();
//! ps.serve(std::future::pending()).await?;
//! # Ok(()) }
//! ```
//!
//! Decisions are made by pure state machines (`shard`, `inbox`, `aggregate`, `push_window`) over
//! the memory of `pushpull-store`. `runtime` drives them with sockets, threads and clocks. This
//! crate does not depend on the worker.

#![cfg_attr(
    all(feature = "simulation", not(debug_assertions)),
    allow(dead_code, reason = "their callers are in no release build")
)]

mod aggregate;
pub mod blocking;
pub mod checkpoint;
mod checkpoint_source;
mod client_entry;
mod client_key;
mod config;
mod coordinators;
mod error;
mod event;
mod inbox;
pub mod inspect;
mod metrics;
mod peer_hello;
mod push_window;
mod runtime;
mod shard;
#[cfg(any(test, fuzzing, all(feature = "simulation", debug_assertions)))]
#[doc(hidden)]
pub mod testing;

/// Optimizers, one type for each rule, with their schedules. All can be used without a server.
pub mod optim {
    pub use pushpull_optim::optimizer::{Runs, SumRun, Sums};
    #[doc(hidden)]
    pub use pushpull_optim::optimizer::{StreamRun, StreamRuns};
    pub use pushpull_optim::{
        Adadelta, Adagrad, Adam, AdamW, ApplyAt, Ftrl, Lamb, Momentum, Optimizer, OptimizerSlot,
        RmsProp, Run, Schedule, Sgd, SparseReduction,
    };
}

#[cfg(feature = "measure")]
#[doc(hidden)]
pub use pushpull_store::measure;
#[cfg(feature = "planted")]
pub use pushpull_store::planted;

pub use config::{
    Asynchronous, Checkpoints, Durability, Mode, Network, NonFinite, OnLoss, OnSaveFailure,
    PsConfig, StalenessPolicy, Storage, Synchronous,
};
pub use error::{ListenError, ServeError, StartError, StorageError};
pub use event::{AdminOrder, Event, Events};
pub use inspect::inspect;
pub use metrics::{Metrics, Overflowed, SaveStatus, StalenessHistogram};
pub use optim::{Adam, Sgd};
/// Who may connect to a server, and what a process proves itself with.
pub mod security {
    pub use pushpull_net::auth::{
        CredentialFiles, Credentials, CredentialsError, check_tokens, new_secret,
    };
}

pub use pushpull_net::{
    ClusterRendezvous, RegisterError, RegisteredTask, TaskRegistration, enter_private_folder,
    raise_open_files_limit,
};
pub use runtime::{Ps, PsHandle, PsListener};
