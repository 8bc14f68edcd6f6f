//! An embeddable parameter server, asynchronous or synchronous: push gradients, pull weights.
//!
//! Parameter-server shards hold the variables of a model in memory-mapped buffers. Workers push
//! gradients and pull weights over a length-prefixed binary protocol. Both sides are plain values
//! in your process. The library has no globals, reads no environment variables, installs no logger
//! and forces no async runtime on you. The daemon `pushpull-ps` is the same library with flags.
//!
//! ```
//! use pushpull::{Adam, ClusterSpec, Ps, PsConfig, Push, TaskId, VariableSpec, Worker, WorkerConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A parameter server. It listens first: the cluster names the port that the system chose.
//! let listener = Ps::listen("127.0.0.1:0").await?;
//! let cluster = ClusterSpec::builder()
//!     .job("ps", [listener.address()])
//!     .job("worker", ["127.0.0.1:1"]) // workers accept no connections
//!     .build()?;
//! let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Adam::new(0.1)).last_step(100);
//! let ps = listener.start(config)?;
//!
//! // A worker. Its loss is half the squared distance of w from (1, 2).
//! let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).await?;
//! let mut params = worker.join(&[VariableSpec::f32("w", [2])?], |_| ()).await?;
//! while let Some(token) = worker.token().await? {
//!     worker.pull(&token, &mut params).await?;
//!     let w = params.view::<f32>("w")?;
//!     let mut gradients = worker.gradients();
//!     gradients.view_mut("w")?.copy_from_slice(&[w[0] - 1.0, w[1] - 2.0]);
//!     match worker.push(token, gradients).await? {
//!         Push::Applied { step, staleness } => assert!(step <= 100 && staleness == 0),
//!         other => panic!("{other:?}"),
//!     }
//! }
//! worker.leave().await?;
//!
//! assert_eq!(ps.handle().metrics().global_step, 100);
//! ps.serve(async {}).await?;
//! # Ok(()) }
//! ```
//!
//! # Synchronous training
//!
//! The mode is a setting of the servers ([`PsConfig::mode`], or `pushpull-ps --synchronous 4/5`).
//! The training loop does not change. With [`Synchronous`] a step applies the mean of several
//! gradients, those of the fastest replicas, and all shards use the same ones. Pulled values are of
//! one step on all shards. The outcomes are:
//!
//! - [`Push::Accepted`]: every shard holds the gradient, and it is part of the step for good.
//! - [`Push::Stale`]: the step was made without the gradient.
//! - [`Pulled::Stale`]: the token's step was made before its values were pulled.
//!
//! After each of them the loop takes another token, which waits until the step is applied on all
//! shards. These settings decide how a step treats absent replicas:
//!
//! - [`Synchronous::on_loss`] (`--on-loss shrink:MIN`, `wait:SECONDS`, `fail`): what happens to a step
//!   when a replica is lost.
//! - [`Synchronous::join_timeout`] (`--join-timeout-ms`): how long the first step waits for replicas
//!   that have not joined.
//! - [`Synchronous::deterministic`] (`--deterministic`): two runs give the same bits.

#![forbid(unsafe_code)]

pub use pushpull_common::catalogue::{Catalogue, CatalogueError};
pub use pushpull_common::cluster::{ClusterError, ClusterSpec, ClusterSpecBuilder};
pub use pushpull_common::codec::{Codec, CodecError};
pub use pushpull_common::device::{DeviceError, DeviceSpec};
pub use pushpull_common::ids::{GlobalStep, Sequence, ShardId, TaskId, VariableId};
pub use pushpull_common::initializer::Initializer;
pub use pushpull_common::partition::Partitioner;
pub use pushpull_common::placement::{
    DeviceSetter, Placement, PlacementError, PlacementStrategy, ShardMap,
};
pub use pushpull_common::protocol::Refusal;
pub use pushpull_common::table::{Eviction, RowAdmission, TableError, TableSpec};
pub use pushpull_common::tensor::{DType, Element, Shape, bf16, f16};
pub use pushpull_common::variable::{VariableError, VariableSpec};
pub use pushpull_ps::{
    Adadelta, Adagrad, Adam, AdamW, Asynchronous, CheckpointError, CheckpointStorage, Checkpoints,
    Durability, Event, Ftrl, Lamb, ListenError, Listener, LocalDirectory, Metrics, Mode, Momentum,
    Network, NonFinite, OnLoss, Optimizer, Overflowed, Ps, PsConfig, PsHandle, Retention, RmsProp,
    SaveStatus, Schedule, ServeError, Sgd, StalenessHistogram, StalenessPolicy, StartError,
    Storage, StorageError, Synchronous, aggregate, inspect, optimizer,
};
pub use pushpull_worker::{
    Checksums, ConfigError, Error, Gradients, InitialValues, LossScale, Params, PassedOver,
    PullHandle, Pulled, Push, PushHandle, Reader, RestoredCheckpoint, SavedCheckpoint, StepOutcome,
    StreamingPush, Token, UnresponsiveShard, UnresponsiveShards, VariableHandle, ViewError, Worker,
    WorkerConfig, blocking,
};

/// The protocol and the shared vocabulary, for programs that speak the wire protocol themselves.
pub use pushpull_common as common;
/// Checkpoint files: list, read and export them without a server.
pub use pushpull_ps::checkpoint;
/// A shard's store by itself, for benchmarks.
#[doc(hidden)]
pub use pushpull_ps::measure;

/// Compiles the code blocks of the README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
