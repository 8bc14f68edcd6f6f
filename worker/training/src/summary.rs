//! Summaries of a training: event files that TensorBoard shows, and JSON lines.
//!
//! A *run* is one directory below the log directory of TensorBoard. Give each worker and each start
//! of a training its own run, or continue in the same directory: every writer begins a new file.
//! `docs/summaries.md` tells how to view them.
//!
//! ```
//! use pushpull_training::summary::{
//!     Hyperparameters, RunStatus, SummaryConfig, SummaryHistogram, SummaryWriter,
//! };
//!
//! # let directory = std::env::temp_dir().join(format!("summary-doc-{}", std::process::id()));
//! let mut summaries = SummaryWriter::create(directory.join("run-1"), SummaryConfig::default())?;
//! summaries.begin_run(&Hyperparameters::new().set("learning_rate", 0.1).metric("loss"))?;
//! for step in 1..=3 {
//!     summaries.scalar(step, "loss", 1.0 / step as f64)?;
//! }
//! summaries.histogram(3, "weights", &SummaryHistogram::of([0.5_f32, -0.5]))?;
//! summaries.text(3, "notes", "The loss *falls*.")?;
//! summaries.end_run(RunStatus::Success)?;
//! summaries.flush()?;
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod error;
mod event;
mod event_file_name;
mod exponential_buckets;
mod histogram;
mod hyperparameters;
mod image;
mod json_line;
mod json_lines;
mod log;
mod protobuf_writer;
mod writer;

pub use config::SummaryConfig;
pub use error::SummaryError;
pub use histogram::{HistogramError, HistogramStatistics, SummaryHistogram};
pub use hyperparameters::{HyperparameterValue, Hyperparameters, RunStatus};
#[cfg(feature = "png")]
pub use image::ImageChannels;
pub use image::{ImageError, SummaryImage};
pub use log::{SummaryLog, SummaryReport};
pub use writer::SummaryWriter;
