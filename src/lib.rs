//! An embeddable parameter server, asynchronous or synchronous: push gradients, pull weights.
//!
//! Parameter-server shards hold the variables of a model in memory-mapped buffers. Workers push
//! gradients and pull weights over a length-prefixed binary protocol. Both sides are plain values
//! in your process. The library has no globals, reads no environment variables, installs no logger
//! and forces no async runtime on you. The daemon `pushpull-ps` is the same library with flags.
//!
//! ```
//! use pushpull::blocking::Worker;
//! use pushpull::local::Cluster;
//! use pushpull::{Adam, PsConfig, Push, VariableSpec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A parameter server for one worker, in this process. `Ps` serves in a process of its own.
//! let cluster = Cluster::start(1, 1, |cluster, task| {
//!     PsConfig::new(cluster, task, Adam::new(0.1)).last_step(100)
//! })?;
//!
//! // A worker. Its loss is half the squared distance of w from (1, 2).
//! let mut worker = Worker::connect(cluster.worker_config(0))?;
//! let mut params = worker.join(&[VariableSpec::f32("w", [2])?], |_| ())?;
//! while let Some(token) = worker.token()? {
//!     worker.pull(&token, &mut params)?;
//!     let w = params.view::<f32>("w")?;
//!     let mut gradients = worker.gradients();
//!     gradients.view_mut("w")?.copy_from_slice(&[w[0] - 1.0, w[1] - 2.0]);
//!     match worker.push(token, gradients)? {
//!         Push::Applied { step, staleness } => assert!(step <= 100 && staleness == 0),
//!         other => panic!("{other:?}"),
//!     }
//! }
//! worker.leave()?;
//!
//! assert_eq!(cluster.handle().metrics().global_step, 100);
//! cluster.stop()?;
//! # Ok(()) }
//! ```
//!
//! [`Worker`] has the same methods as futures, for any executor.
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
//! - [`Synchronous::on_loss`] (`--on-loss shrink:MIN`, `wait:SECONDS`, `fail`): what happens to a
//!   step when a replica is lost.
//! - [`Synchronous::join_timeout`] (`--join-timeout-ms`): how long the first step waits for
//!   replicas that have not joined.
//! - [`Synchronous::deterministic`] (`--deterministic`): two runs give the same bits.

#![forbid(unsafe_code)]

pub use pushpull_common::cluster::ClusterSpec;
pub use pushpull_common::ids::TaskId;
pub use pushpull_common::variable::VariableSpec;
pub use pushpull_ps::{
    Adam, Asynchronous, Mode, Ps, PsConfig, PsHandle, Sgd, Storage, Synchronous,
};
pub use pushpull_worker::{Error, Pulled, Push, Token, WorkerConfig};

/// The training loop of one replica.
///
/// ```
/// # use pushpull::{PsConfig, Sgd, VariableSpec, Worker};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(3);
/// # let cluster = pushpull::local::Cluster::start(1, 2, start)?;
/// let mut worker = Worker::connect(cluster.worker_config(0)).await?;
/// let mut params = worker
///     .join(&[VariableSpec::f32("w", [2])?], |initial| {
///         initial.set("w", &[8.0_f32, 4.0]);
///     })
///     .await?;
/// while let Some(token) = worker.token().await? {
///     worker.pull(&token, &mut params).await?;
///     let mut gradients = worker.gradients();
///     gradients.view_mut::<f32>("w")?.copy_from_slice(params.view("w")?);
///     worker.push(token, gradients).await?;
/// }
/// worker.leave().await?;
/// # Ok(()) }
/// ```
pub use pushpull_worker::Worker;

/// Reads the values of a model that others train.
///
/// ```
/// # use pushpull::{PsConfig, Reader, Sgd, VariableSpec, Worker};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(3);
/// # let cluster = pushpull::local::Cluster::start(1, 2, start)?;
/// # let mut worker = Worker::connect(cluster.worker_config(0)).await?;
/// # let variables = [VariableSpec::f32("w", [2])?];
/// # let _ = worker.join(&variables, |initial| _ = initial.set("w", &[8.0_f32, 4.0])).await?;
/// let mut reader = Reader::connect(cluster.worker_config(1)).await?;
/// let mut params = reader.params();
/// let step = reader.pull(&mut params).await?;
/// assert_eq!((step, params.view::<f32>("w")?), (0, &[8.0, 4.0][..]));
/// # Ok(()) }
/// ```
pub use pushpull_worker::Reader;

/// The values of a model in the memory of a replica.
///
/// ```
/// # use pushpull::{PsConfig, Sgd, VariableSpec, Worker};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(3);
/// # let cluster = pushpull::local::Cluster::start(1, 2, start)?;
/// # let mut worker = Worker::connect(cluster.worker_config(0)).await?;
/// let variables = [VariableSpec::f32("w", [2, 2])?, VariableSpec::f32("b", [2])?];
/// let params = worker.join(&variables, |initial| _ = initial.set("b", &[0.5_f32, 1.5])).await?;
/// let [w, b] = params.views::<f32, 2>(["w", "b"])?;
/// assert_eq!((w, b), (&[0.0; 4][..], &[0.5, 1.5][..]));
/// assert!(params.view::<f64>("b").is_err(), "its elements are f32");
/// # Ok(()) }
/// ```
pub use pushpull_worker::Params;

/// The contents of one push.
///
/// ```
/// # use pushpull::{PsConfig, Push, Sgd, VariableSpec, Worker};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(3);
/// # let cluster = pushpull::local::Cluster::start(1, 2, start)?;
/// # let mut worker = Worker::connect(cluster.worker_config(0)).await?;
/// # let variables = [VariableSpec::f32("w", [2])?, VariableSpec::f32("b", [1])?];
/// # let _ = worker.join(&variables, |_| ()).await?;
/// # let token = worker.token().await?.ok_or("there are three steps")?;
/// let mut gradients = worker.gradients(); // "b" is left out
/// gradients.view_mut::<f32>("w")?.copy_from_slice(&[3.0, 4.0]);
/// assert_eq!(gradients.clip_by_global_norm(1.0)?, 5.0);
/// assert_eq!(worker.push(token, gradients).await?, Push::Applied { step: 1, staleness: 0 });
/// # Ok(()) }
/// ```
pub use pushpull_worker::Gradients;

/// Blocking forms of servers, workers, readers, training sessions, rings, clients of functions and
/// coordinators, for threads without an async runtime. A type has the verbs of its namesake.
pub mod blocking {
    #[cfg(feature = "ring")]
    pub use pushpull_collective::blocking::Ring;
    pub use pushpull_ps::blocking::Ps;
    #[cfg(feature = "services")]
    pub use pushpull_services::blocking::{
        Coordinator, FunctionClient, FunctionServer, RemoteValue,
    };
    #[cfg(feature = "training")]
    pub use pushpull_training::blocking::{Step, StreamingStep, TrainingSession};
    pub use pushpull_worker::blocking::{Reader, Started, StreamingPush, Worker};
}

pub mod local;

#[cfg(feature = "job")]
pub mod job;

/// Tasks, and the shards on which variables are placed.
pub mod cluster {
    pub use pushpull_common::cluster::ClusterSpecBuilder;
    pub use pushpull_common::device::{DeviceFilters, DeviceSpec};
    pub use pushpull_common::ids::ShardId;
    pub use pushpull_common::placement::{
        CustomStrategy, DeviceSetter, PlacedPartition, Placement, PlacementStrategy, ShardMap,
        TaskLoads,
    };

    /// The cluster and the task of a process, as its launcher tells them.
    pub mod resolve {
        pub use pushpull_common::cluster::resolve::{
            ClusterSource, Known, NodeListProblem, RegisteringTask, RendezvousPlan, Resolution,
            ResolveError, Resolver, expand_node_list, resolve, union,
        };
    }

    /// The rendezvous at which the tasks of a cluster learn each other's addresses, for launchers
    /// that tell nobody its peers.
    pub mod rendezvous {
        pub use pushpull_common::cluster::ClusterSize;
        pub use pushpull_common::task_registry::RendezvousEvent;
        pub use pushpull_ps::{ClusterRendezvous, RegisteredTask, TaskRegistration};
    }
}

/// What a variable is: its type and shape, its first values, how it is cut, and tables that grow.
pub mod variable {
    pub use pushpull_common::catalogue::Catalogue;
    pub use pushpull_common::ids::VariableId;
    pub use pushpull_common::initializer::Initializer;
    pub use pushpull_common::names::NamePattern;
    pub use pushpull_common::partition::Partitioner;
    pub use pushpull_common::table::{Eviction, RowAdmission, TableSpec};
    pub use pushpull_common::tensor::{DType, Element, Shape, bf16, f16};
    pub use pushpull_common::variable::Replication;
}

/// The settings of a server, what it reports, and its administration from elsewhere.
pub mod server {
    pub use pushpull_common::status::{
        DataStatus, HeldToken, MemberStatus, Presence, Status, TrainingPhase, Waiting,
    };
    pub use pushpull_ps::{
        AdminOrder, Durability, Event, Events, Metrics, Network, NonFinite, OnLoss, Overflowed,
        PsListener, SaveStatus, StalenessHistogram, StalenessPolicy, enter_private_folder,
        raise_open_files_limit,
    };
    pub use pushpull_worker::Admin;
}

/// Who may connect to a server and do what, and what a process proves itself with: access tokens, and
/// certificates over TLS (feature `tls`).
///
/// `docs/security.md` says what is protected against whom.
pub mod security {
    pub use pushpull_common::access::{AccessEvent, DeniedPeer};
    pub use pushpull_ps::security::{CredentialFiles, Credentials, check_tokens, new_secret};
}

/// What a training loop meets beside [`Worker`]: operations under way and their outcomes, interrupts,
/// first values, codecs, loss scaling, data sets.
pub mod worker {
    pub use pushpull_common::codec::Codec;
    pub use pushpull_common::data_set::{DataSet, SampleRange};
    pub use pushpull_common::ids::{GlobalStep, Sequence};
    pub use pushpull_common::protocol::message::EndReason;
    pub use pushpull_worker::{
        Advice, Checksums, DataBegun, InitialValues, Interrupt, LoadOptions, LossScale,
        OpenedCoordinator, PassedOver, PullHandle, PushHandle, RecordedDigests, RestoredCheckpoint,
        SavedCheckpoint, StepOutcome, StreamingPush, UnresponsiveShard, UnresponsiveShards,
        VariableHandle, WorkerMetrics,
    };
}

/// Training sessions with their hooks, the data pipeline, record files and summaries for
/// TensorBoard. Needs the feature `training`.
///
/// `docs/training.md` has the order of all calls, and what each failure does.
///
/// ```
/// use pushpull::training::{StopReason, TrainingConfig, TrainingSession, hooks};
/// # use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let listener = Ps::listen("127.0.0.1:0").await?;
/// # let builder = ClusterSpec::builder().job("ps", [listener.address()]);
/// # let cluster = builder.job("worker", ["127.0.0.1:1", "127.0.0.1:2"]).build()?;
/// # let _ps = listener.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.5)))?;
/// let config = TrainingConfig::new(WorkerConfig::new(cluster, TaskId::worker(0)))
///     .variables([VariableSpec::f32("w", [2])?])
///     .initialize(|initial| _ = initial.set("w", &[8.0_f32, 4.0]))
///     .hook(hooks::StopAtStep::last(20))
///     .hook(hooks::NanGuard::fail());
/// let mut session = TrainingSession::start(config).await?;
/// while let Some(mut step) = session.step().await? {
///     let (params, gradients) = step.parts();
///     let w = params.view::<f32>("w")?;
///     gradients.view_mut::<f32>("w")?.copy_from_slice(w);
///     let loss = w.iter().map(|w| w * w / 2.0).sum::<f32>();
///     step.scalar("loss", loss);
///     step.push().await?;
/// }
/// let ended = session.close().await?;
/// assert_eq!(ended.step, 20);
/// assert!(matches!(ended.reason, StopReason::Hook { .. }));
/// # Ok(()) }
/// ```
#[cfg(feature = "training")]
pub mod training {
    pub use pushpull_training::{
        ComputedStep, DetachedStep, FinalValues, FinishedStep, Flow, GradientOutcome, GrantedStep,
        Hook, HookError, HookPlace, JoinReport, RetryReport, Scalars, Step, StepGate, StepTiming,
        StopReason, StreamingStep, TrainingConfig, TrainingEnd, TrainingSession, TrainingSetup,
        data, hooks, summary, tfrecord,
    };
}

/// Named functions: servers that compute, and clients that call them on tasks and devices. Needs the
/// feature `services`.
///
/// `docs/services.md` says what a call may be given, what it may leave, and how each failure ends.
///
/// ```
/// use pushpull::blocking::{FunctionClient, FunctionServer};
/// use pushpull::services::{Call, Functions};
///
/// let server = FunctionServer::local(Functions::new().add("hello", |_| Ok("Hello!")))?;
/// let client = FunctionClient::connect(server.target())?;
/// assert_eq!(client.call(Call::new("hello"))?.text()?, "Hello!");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "services")]
pub mod services {
    pub use pushpull_services::{
        Call, Coordinator, CoordinatorConfig, Description, Elements, FunctionClient,
        FunctionClientConfig, FunctionError, FunctionServer, FunctionServerConfig,
        FunctionServerError, FunctionServerHandle, FunctionServerListener, Functions, Invocation,
        Keeping, Kept, OutOfDescriptors, Outputs, PerWorker, RemoteValue, Running, ServiceError,
        ServicePeers, Signature, State, TowerStep, Towers, Unreachable, Value, ValueError,
        ValueType,
    };
}

/// Ring all-reduce: processes that reduce, gather and broadcast together, without servers. Needs the
/// feature `ring`.
///
/// `docs/ring.md` says how ranks find each other, and what each failure does.
///
/// ```
/// use pushpull::blocking::Ring;
/// use pushpull::collective::{Launch, LaunchError, Reduction, RingConfig};
///
/// // Under mpirun, srun or horovodrun the place of a rank is in its environment.
/// let launch = match Launch::from_lookup(|name| std::env::var(name).ok()) {
///     Err(LaunchError::NoLauncher { .. }) => Launch::new(0, 1)?,
///     launch => launch?,
/// };
/// let mut ring = Ring::join(RingConfig::new(launch))?;
/// let mut gradient = [1.0_f32, 2.0];
/// ring.all_reduce(&mut gradient, Reduction::Mean)?;
/// assert_eq!(gradient, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "ring")]
pub mod collective {
    pub use pushpull_collective::{
        ElementKind, EncodedTensor, Launch, LaunchError, Launcher, Reduction, Ring, RingConfig,
        RingElement, RingError, RingMetrics, RingStall, Tensor, Transport,
    };
    pub use pushpull_common::codec::Residual;
    pub use pushpull_worker::{RingTrainer, RingTrainerConfig, StreamedStep};
}

/// Where a worker computes gradients, and kernels with derivatives that are written by hand. Needs
/// the feature `compute`.
///
/// A model needs none of this: it may compute from slices as it likes. The examples and benches use
/// these.
///
/// ```
/// use pushpull::compute::{Device, Mlp, Samples};
///
/// let mut mlp = Mlp::new(Device::pick("cpu:1")?, &[2, 2]);
/// let (weights, biases) = ([1.0, 0.0, 0.0, 1.0], [0.0; 2]);
/// let samples = Samples { features: &[3.0, 1.0, 1.0, 3.0], labels: &[0, 1] };
/// assert_eq!(mlp.accuracy(&[(&weights).into(), (&biases).into()], samples)?, 1.0);
/// # Ok::<(), pushpull::compute::ComputeError>(())
/// ```
#[cfg(feature = "compute")]
pub mod compute {
    pub use pushpull_device::{
        Activation, Bags, Buffer, Combiner, ComputeError, Device, DeviceElement, DeviceInfo,
        EmbeddingBag, Half, LabelledBags, Logistic, Matrix, Mlp, Network, Pinned, Resident,
        Samples, Targets, Transfer, View, ViewMut, cuda_devices, devices,
    };
    #[cfg(feature = "nccl")]
    pub use pushpull_device::{Nccl, NcclElement, NcclError, NcclId, NcclReduction};
    pub use pushpull_worker::devices::{
        Compute, ComputeFn, DeviceGradients, DeviceParams, DeviceTowers, Divide, Model, ModelError,
        StepGradients, StepValues, compute_fn,
    };
}

/// Checkpoints: where and when servers save them; files can be listed, read and exported without a
/// server.
pub mod checkpoint {
    pub use pushpull_common::local_path::check as check_local_path;
    pub use pushpull_ps::checkpoint::{
        CheckpointContents, CheckpointError, CheckpointStorage, CheckpointSummary, Listing,
        LocalDirectory, ReadFile, Refused, Retention, StorageClaim, StorageFault, WriteFile,
        contents, export, export_since, list,
    };
    pub use pushpull_ps::{Checkpoints, OnSaveFailure};
}

/// Checkpoints and training data on object stores and HDFS, at URLs such as `s3://bucket/run`.
///
/// The features `s3`, `gs`, `az` and `hdfs` each add a kind of URL. See `docs/remote.md`.
///
/// ```no_run
/// use pushpull::remote::{RemoteOptions, RemoteStorage};
/// use pushpull::checkpoint::Checkpoints;
///
/// let options = RemoteOptions::from_lookup(|name| std::env::var(name).ok());
/// let storage = RemoteStorage::open("s3://bucket/run", options)?;
/// let checkpoints = Checkpoints::new(storage);
/// # Ok::<(), pushpull::remote::RemoteError>(())
/// ```
#[cfg(feature = "remote")]
pub mod remote {
    pub use pushpull_remote::{
        RemoteEntry, RemoteError, RemoteFault, RemoteFiles, RemoteInput, RemoteOptions,
        RemoteScheme, RemoteStorage, RemoteUrl,
    };
}

pub use pushpull_ps::{inspect, optim};

pub mod error {
    //! Every error of this crate, by the operation that returns it. Some belong to a feature.
    //!
    //! No error displays its source: [`Chain`] displays an error with its causes.
    //!
    //! | operation | error |
    //! | --- | --- |
    //! | name tasks and devices | [`ClusterError`], [`DeviceError`] |
    //! | declare a data set | [`DataSetError`] |
    //! | declare a variable | [`VariableError`], whose source is one of [`ShapeError`], [`InitializerError`], [`PartitionError`] and [`TableError`] |
    //! | place variables | [`PlacementError`], [`CatalogueError`] |
    //! | encode gradients | [`CodecError`] |
    //! | open a device, run a kernel | `compute::ComputeError` |
    //! | join a communicator of NCCL, run its collectives | `compute::NcclError` |
    //! | compute the gradients of a step | `compute::ModelError` |
    //! | listen, start, serve | [`ListenError`], [`StartError`], [`ServeError`], [`LocalClusterError`] |
    //! | open or inspect a state directory | [`StorageError`] |
    //! | save, restore, export | [`CheckpointError`](crate::checkpoint::CheckpointError) |
    //! | read training data | `DataError`, whose source may be a `SourceError`; `StreamError` |
    //! | train, read | [`Error`](crate::Error), with [`ConfigError`] and [`ViewError`] for faults of the program, and [`LoadError`] for a file of first values |
    //! | train in a session | `TrainingError` |
    //! | join a ring, perform its operations | `collective::RingError`, and `collective::LaunchError` for the place in a job |
    //! | register at the rendezvous of a cluster | [`RegisterError`] |
    //! | read credentials | [`CredentialsError`] |
    //! | read a job file, build servers and workers from it | `job::JobError` |
    //! | write and read records | `training::tfrecord::TfRecordError` |
    //! | write summaries | `training::summary::SummaryError`, `training::summary::HistogramError`, `training::summary::ImageError` |

    pub use crate::local::LocalClusterError;
    pub use pushpull_common::catalogue::CatalogueError;
    pub use pushpull_common::cluster::{AddressProblem, ClusterError};
    pub use pushpull_common::codec::CodecError;
    pub use pushpull_common::data_set::DataSetError;
    pub use pushpull_common::device::DeviceError;
    pub use pushpull_common::error::Chain;
    pub use pushpull_common::initializer::InitializerError;
    pub use pushpull_common::local_path::UnsupportedScheme;
    pub use pushpull_common::partition::PartitionError;
    pub use pushpull_common::placement::PlacementError;
    pub use pushpull_common::table::TableError;
    pub use pushpull_common::tensor::ShapeError;
    pub use pushpull_common::variable::VariableError;
    pub use pushpull_ps::security::CredentialsError;
    pub use pushpull_ps::{ListenError, RegisterError, ServeError, StartError, StorageError};
    #[cfg(feature = "training")]
    pub use pushpull_training::{
        TrainingError,
        data::{DataError, SourceError, StreamError},
    };
    pub use pushpull_worker::{ConfigError, LoadError, ViewError};
}

/// The wire protocol, for programs that speak it themselves.
pub mod protocol {
    pub use pushpull_common::codec::{Encoding, Encodings};
    pub use pushpull_common::effect_window::{EffectWindow, Settlement};
    pub use pushpull_common::identity::Identity;
    pub use pushpull_common::ids::{
        ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, Incarnation,
        PartitionId, RequestId, RestoreEpoch, TokenId,
    };
    // Not the module `encode`, which has the name of its function.
    pub use pushpull_common::protocol::encode::{encode, encode_for};
    pub use pushpull_common::protocol::{
        BodyPoll, BodyStamp, EffectId, EffectRef, Envelope, Features, FrameEvent, FrameProgress,
        FrameReader, FrameSink, Grant, Header, Message, Outcome, Poll, ProtocolError, PushState,
        Refusal, SampleRange, decode, header, limits, message, version, wire,
    };
}

/// Compiles the code blocks of the README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// Compiles the code blocks of the page on classic names as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/classic.md")]
pub struct ClassicPage;

/// Compiles the code blocks of the page on functions as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/services.md")]
pub struct Services;

/// Compiles the code block of the page on rings as a doctest.
#[cfg(all(doctest, feature = "ring", feature = "training"))]
#[doc = include_str!("../docs/ring.md")]
pub struct RingPage;

/// Compiles the code block of the page on job files as a doctest.
#[cfg(all(doctest, feature = "job"))]
#[doc = include_str!("../docs/job.md")]
pub struct JobPage;

/// Compiles the code block of the page on devices and kernels as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../docs/compute.md")]
pub struct ComputePage;
