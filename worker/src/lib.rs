//! The worker's side of pushpull: a session with the parameter servers, a local copy of the
//! variables, and gradients to push.
//!
//! ```no_run
//! use pushpull_common::cluster::ClusterSpec;
//! use pushpull_common::ids::TaskId;
//! use pushpull_common::variable::VariableSpec;
//! use pushpull_worker::{Push, Worker, WorkerConfig};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let cluster: ClusterSpec = "ps=127.0.0.1:2222;worker=127.0.0.1:2223".parse()?;
//! let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).await?;
//! let variables = [VariableSpec::f32("w", [3])?];
//! let mut params = worker.join(&variables, |initial| {
//!     initial.set("w", &[1.0_f32, 2.0, 3.0]);
//! }).await?;
//! while let Some(token) = worker.token().await? {
//!     if worker.pull(&token, &mut params).await?.is_stale() {
//!         continue;
//!     }
//!     let mut gradients = worker.gradients();
//!     gradients.view_mut::<f32>("w")?.copy_from_slice(params.view("w")?);
//!     if let Push::Applied { step, staleness } = worker.push(token, gradients).await? {
//!         println!("step {step}, {staleness} behind");
//!     }
//! }
//! worker.leave().await?;
//! # Ok(()) }
//! ```
//!
//! The decisions are in pure state machines (`session`, `gradients`). `runtime` drives them
//! with a thread, sockets and a clock. This crate does not depend on the server's.

#![deny(unsafe_code)]

mod admin;
pub mod blocking;
mod client;
mod clipping;
mod compression;
mod config;
mod contained;
mod coordinators;
mod declaring;
#[cfg(feature = "devices")]
pub mod devices;
mod error;
mod gradients;
mod initial_values;
#[doc(hidden)]
pub mod internal;
mod interrupt;
mod joined_model;
mod joining;
mod json_entries;
mod local_values;
mod loss_scale;
mod mapped_values;
mod mean_variables;
mod metrics;
mod outcome;
mod pause;
mod pull_client;
mod reader;
#[cfg(feature = "ring")]
mod ring;
mod runtime;
mod safetensors_file;
mod safetensors_index;
mod session;
mod start;
mod streaming_push;
mod tensor_files;
mod testing;
mod token;
mod worker;

pub use admin::Admin;
pub use config::{Checksums, WorkerConfig};
pub use coordinators::{OpenedCoordinator, RecordedDigests};
pub use error::{
    Advice, ConfigError, Error, LoadError, UnresponsiveShard, UnresponsiveShards, ViewError,
};
pub use gradients::params::{Gradients, Params};
pub use initial_values::{InitialValues, LoadOptions};
pub use interrupt::Interrupt;
pub use loss_scale::LossScale;
pub use metrics::WorkerMetrics;
pub use outcome::{
    DataBegun, PassedOver, Pulled, Push, RestoredCheckpoint, SavedCheckpoint, StepOutcome,
};
pub use reader::Reader;
#[cfg(feature = "ring")]
pub use ring::{RingTrainer, RingTrainerConfig, StreamedStep};
pub use streaming_push::StreamingPush;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use testing::simulation;
pub use token::Token;
pub use worker::{PullHandle, PushHandle, VariableHandle, Worker};
