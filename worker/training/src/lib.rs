//! Training sessions around the loop of a worker: hooks, a data pipeline, record files and
//! summaries.
//!
//! The private `lifecycle` decides the order of all calls of a session, without a clock or a
//! socket. [`TrainingSession`] carries its decisions out, over the worker of `pushpull-worker`. The
//! blocking twin is [`blocking::TrainingSession`].

#![forbid(unsafe_code)]

mod append_buffer;
mod backoff;
pub mod blocking;
mod cadence;
mod checkpoint_cadence;
mod checkpoint_plan;
#[cfg(feature = "devices")]
mod computed_steps;
pub mod data;
#[cfg(feature = "ring")]
mod dense_rank;
mod gradient_outcome;
mod hook;
mod hook_list;
pub mod hooks;
mod known_steps;
mod lifecycle;
mod progress_hook;
mod recovery_window;
mod replica_worker;
#[cfg(feature = "ring")]
#[cfg(test)]
mod ring_stream_tests;
#[cfg(feature = "ring")]
#[cfg(test)]
mod ring_tests;
mod scalars;
mod session_replica;
mod step;
mod step_grant;
mod streaming_step;
pub mod summary;
pub mod tfrecord;
mod training_config;
mod training_end;
mod training_error;
mod training_session;

pub use gradient_outcome::GradientOutcome;
pub use hook::{
    ComputedStep, FinishedStep, Flow, GrantedStep, Hook, HookError, JoinReport, RetryReport,
    StepGate, StepTiming, TrainingSetup,
};
pub use scalars::Scalars;
pub use step::{DetachedStep, Step};
pub use streaming_step::StreamingStep;
pub use training_config::TrainingConfig;
pub use training_end::{FinalValues, StopReason, TrainingEnd};
pub use training_error::{HookPlace, TrainingError};
pub use training_session::TrainingSession;

pub(crate) use lifecycle::{NextAction, PushRecovery};
pub(crate) use step_grant::StepGrant;
