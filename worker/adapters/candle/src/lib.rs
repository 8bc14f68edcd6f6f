//! Trains models of [candle](https://github.com/huggingface/candle) over pushpull's parameter
//! servers.
//!
//! [`PushPull`] takes the place of candle's optimizer. It declares the variables of a
//! [`VarMap`](candle_nn::VarMap), keeps the pulled values in them, and pushes the gradients of a
//! loss. The servers apply the optimizer.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear};
//! use pushpull::local::Cluster;
//! use pushpull::training::TrainingConfig;
//! use pushpull::{PsConfig, Sgd};
//! use pushpull_candle::PushPull;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.2)).last_step(200);
//! # let cluster = Cluster::start(1, 1, start)?;
//! # let worker = cluster.worker_config(0);
//! let variables = VarMap::new();
//! let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//! let model = linear(1, 1, builder.pp("line"))?;
//!
//! let mut optimizer = PushPull::from_varmap(&variables, TrainingConfig::new(worker))?;
//! let x = Tensor::new(&[[0.0_f32], [0.5], [1.0]], &Device::Cpu)?;
//! let y = Tensor::new(&[[1.0_f32], [2.0], [3.0]], &Device::Cpu)?;
//! while optimizer.ready()? {
//!     let loss = candle_nn::loss::mse(&model.forward(&x)?, &y)?;
//!     optimizer.backward_step(&loss)?;
//! }
//! let weight = model.weight().to_vec2::<f32>()?[0][0];
//! assert!((weight - 2.0).abs() < 0.05, "the slope is 2, not {weight}");
//! optimizer.close()?;
//! # cluster.stop()?;
//! # Ok(()) }
//! ```
//!
//! # Variables
//!
//! - All workers declare the variables in the order of their names, not in that of the model.
//! - Elements are of f32, f64, f16 or bf16. Servers keep f16 and bf16 in f32.
//! - The first values are those of the chief, or those of a checkpoint.
//! - A variable that the loss does not depend on is left out of the push.
//! - Running statistics, which no gradient changes, stay on each worker: variables whose names end
//!   with `running_mean` or `running_var`, and those that [`PushPullBuilder::local`] names.
//!   [`PushPullBuilder::mean_every_steps`] averages them among the workers instead.
//! - Embeddings need not be part of the map: [`PushPullBuilder::embedding`] declares one whose rows
//!   are pulled and pushed as they are used.
//!
//! # Cost
//!
//! Of each step, one copy of the gradients to the push, and one of the pulled values to the
//! variables; on a GPU, the transfers. The values are read and written in place otherwise.

mod builder;
mod elements;
mod error;
mod push_pull;

pub use builder::PushPullBuilder;
pub use error::AdapterError;
pub use push_pull::PushPull;
