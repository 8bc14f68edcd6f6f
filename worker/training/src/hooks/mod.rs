//! The hooks of this library, each a value with its own state.
//!
//! | hook | what it does |
//! | --- | --- |
//! | [`StopAtStep`] | ends the training at a global step, or after a number of steps |
//! | [`StepCounter`] | sets the scalar `global_steps_per_second` |
//! | [`Log`] | writes a line every few steps or seconds to a function of the caller |
//! | [`NanGuard`] | ends the training before a NaN is pushed |
//! | [`EarlyStopping`] | ends the training once a scalar no longer improves |
//! | [`FinalMetrics`] | computes metrics from the final values |
//! | [`GlobalStepWaiter`] | delays the first step until the others have made some |
//! | [`Timeline`] | writes the phases of steps as a trace for a browser |
//! | [`Summaries`] | gives the scalars of every few steps or seconds to a [`ScalarSink`] |

mod early_stopping;
mod final_metrics;
mod global_step_waiter;
mod log;
mod nan_guard;
mod step_counter;
mod stop_at_step;
mod summaries;
mod timeline;

pub use early_stopping::EarlyStopping;
pub use final_metrics::{FinalMetrics, MetricsHandle};
pub use global_step_waiter::GlobalStepWaiter;
pub use log::Log;
pub use nan_guard::NanGuard;
pub use step_counter::StepCounter;
pub use stop_at_step::StopAtStep;
pub use summaries::{ScalarSink, Summaries};
pub use timeline::Timeline;
