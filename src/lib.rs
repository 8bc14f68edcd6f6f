//! An embeddable parameter server, asynchronous or synchronous: push gradients, pull weights.
//!
//! Parameter-server shards hold the variables of a model in memory-mapped buffers; workers push
//! gradients and pull weights over a length-prefixed binary protocol. Both sides are values in
//! your process: there are no globals, no environment variables are read, no logger is installed,
//! and no runtime is forced on you. The daemon `pushpull-ps` is the same library with flags.
//!
//! ```
//! use pushpull::{Adam, ClusterSpec, Ps, PsConfig, Push, TaskId, VariableSpec, Worker, WorkerConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A parameter server. Addresses first, so that port 0 works.
//! let listener = Ps::listen("127.0.0.1:0").await?;
//! let cluster = ClusterSpec::builder()
//!     .job("ps", [listener.address()])
//!     .job("worker", ["127.0.0.1:1"]) // nobody connects to a worker
//!     .build()?;
//! let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Adam::new(0.1)).last_step(100);
//! let ps = listener.start(config)?;
//!
//! // A worker: the loss is the distance of w from (1, 2).
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
//! The mode is a setting of the servers ([`PsConfig::mode`], or `pushpull-ps --synchronous 4/5`); the
//! loop is the same. In [`Mode::Synchronous`] a step is the mean of several gradients, those of the
//! fastest replicas, and all shards take the same. [`Push::Accepted`] means that every shard holds the
//! gradient and it is a part of the step, for good; [`Push::Stale`] that the step was made without
//! it; [`Pulled::Stale`] that the token's step was made before its values were pulled. After each of
//! them the loop takes another token, which waits until the step is applied everywhere. Values are of
//! one step on all shards. [`PsConfig::on_loss`] (`--on-loss shrink:MIN`, `wait:SECONDS`, `fail`) says
//! what becomes of a step when a replica is lost, [`PsConfig::join_timeout`] (`--join-timeout-ms`) how
//! long the first one counts on those who have not come, and [`PsConfig::deterministic`]
//! (`--deterministic`) makes runs equal to the bit.

#![forbid(unsafe_code)]

pub use pushpull_common::catalogue::{Catalogue, CatalogueError};
pub use pushpull_common::cluster::{ClusterError, ClusterSpec, ClusterSpecBuilder};
pub use pushpull_common::codec::{Codec, CodecError};
pub use pushpull_common::device::{DeviceError, DeviceFilters, DeviceSpec};
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
    Adadelta, Adagrad, Adam, AdamW, CheckpointError, CheckpointStorage, Checkpoints, Durability,
    Event, Ftrl, Lamb, ListenError, Listener, LocalDirectory, Metrics, Mode, Momentum, NonFinite,
    OnLoss, Optimizer, Overflowed, Ps, PsConfig, PsHandle, Retention, RmsProp, SaveError,
    SaveStatus, Schedule, ServeError, Sgd, StalenessHistogram, StalenessPolicy, StartError,
    Storage, StorageError, aggregate, inspect, optimizer,
};
pub use pushpull_worker::{
    Checksums, ClipError, ConnectError, Error, Gradients, InitialValues, JoinError, LossScale,
    LossScaleError, Params, PassedOver, PullHandle, Pulled, Push, PushHandle, Reader, ReaderError,
    ResidualsError, RestoredCheckpoint, SavedCheckpoint, StepOutcome, StreamingPush, Token,
    UnresponsiveShard, UnresponsiveShards, VariableHandle, ViewError, Worker, WorkerConfig,
    blocking,
};

pub use pushpull_common as common;
/// Checkpoints as files: listing, reading and exporting them without a server.
pub use pushpull_ps::checkpoint;
/// The protocol and the pure vocabulary, for those who build on the wire itself.
#[doc(hidden)]
pub use pushpull_ps::measure;

/// Compiles the snippets of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
