//! Trains modules of [burn](https://burn.dev) over pushpull's parameter servers.
//!
//! [`PushPullStrategy`] makes burn's own `Learner` a worker: it is given to
//! `SupervisedTraining::with_training_strategy`, and the module stays as it is. A training loop of
//! your own uses [`PushPull`] in the place of burn's optimizer:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::GradientsParams;
//! use burn::tensor::{Device, Tensor};
//! use pushpull::local::Cluster;
//! use pushpull::training::TrainingConfig;
//! use pushpull::{PsConfig, Sgd};
//! use pushpull_burn::PushPull;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.2)).last_step(200);
//! # let cluster = Cluster::start(1, 1, start)?;
//! # let worker = cluster.worker_config(0);
//! let device = Device::default().autodiff();
//! let line: Linear = LinearConfig::new(1, 1).init(&device);
//!
//! let (mut optimizer, mut line) = PushPull::from_module(line, TrainingConfig::new(worker))?;
//! let x = Tensor::<2>::from_data([[0.0], [0.5], [1.0]], &device);
//! let y = Tensor::<2>::from_data([[1.0], [2.0], [3.0]], &device);
//! while optimizer.ready() {
//!     let loss = (line.forward(x.clone()) - y.clone()).square().mean();
//!     let gradients = GradientsParams::from_grads(loss.backward(), &line);
//!     line = optimizer.step(line, gradients)?;
//! }
//! let (_, line) = optimizer.close(line)?;
//! let weight: f32 = line.weight.val().into_scalar();
//! assert!((weight - 2.0).abs() < 0.05, "the slope is 2, not {weight}");
//! # cluster.stop()?;
//! # Ok(()) }
//! ```
//!
//! # Parameters
//!
//! - Names are the paths in the module: `encoder.layers.0.weight`. All workers declare them in the
//!   order of their names.
//! - Elements are of f32, f64, f16 or bf16. Servers keep f16 and bf16 in f32.
//! - The first values are those of the chief, or those of a checkpoint.
//! - A parameter without gradient is left out of the push.
//! - Running statistics and frozen parameters, which require no gradient, stay on each worker.
//!   [`PushPullBuilder::mean_every_steps`] averages them among the workers instead.
//!
//! # Cost
//!
//! Of each step, two copies of the gradients, since burn gives no access to the memory of a tensor,
//! and two of the pulled values; on a GPU, the transfers.

mod elements;
mod error;
mod parameters;
mod push_pull;
mod strategy;

pub use error::AdapterError;
pub use push_pull::{PushPull, PushPullBuilder};
pub use strategy::PushPullStrategy;
