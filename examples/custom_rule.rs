//! A custom update rule: one implementation of the trait `Optimizer`.
//!
//! The rule is Lion (Chen and others, 2023, "Symbolic discovery of optimization algorithms",
//! algorithm 2, without its weight decay). The model is a plane through points. Server and worker
//! run in this process. `cargo run --example custom_rule` prints the final loss.

use std::error::Error;

use pushpull::local::Cluster;
use pushpull::optim::{ApplyAt, Optimizer, OptimizerSlot, Run, Schedule};
use pushpull::{PsConfig, VariableSpec, Worker};

/// Lion: `w -= lr sign(b1 m + (1-b1) g)`, `m = b2 m + (1-b2) g`.
#[derive(Debug)]
pub(crate) struct Lion {
    learning_rate: Schedule,
    beta1: f64,
    beta2: f64,
}

impl Lion {
    /// Creates the rule with this learning rate, the distance that every value moves in an update.
    pub(crate) fn new(learning_rate: impl Into<Schedule>) -> Self {
        Lion { learning_rate: learning_rate.into(), beta1: 0.9, beta2: 0.99 }
    }

    /// Updates a run of either type. Computes in f64 and rounds at the end.
    fn apply<T: Copy + Into<f64>>(&self, at: ApplyAt, run: Run<'_, T>, round: fn(f64) -> T) {
        let rate = self.learning_rate.at(at.step) * at.rate;
        let [momentum] = run.slots else {
            unreachable!("a run has the slots that the rule declares")
        };
        let elements = run.values.iter_mut().zip(momentum.iter_mut()).zip(run.gradient);
        for ((value, momentum), &gradient) in elements {
            let m: f64 = (*momentum).into();
            let g: f64 = gradient.into();
            let direction = self.beta1 * m + (1.0 - self.beta1) * g;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *value = round((*value).into() - rate * sign);
            *momentum = round(self.beta2 * m + (1.0 - self.beta2) * g);
        }
    }
}

impl Optimizer for Lion {
    fn kind(&self) -> &'static str {
        "lion"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const { &[OptimizerSlot::new("momentum", 0.0)] }
    }

    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>) {
        self.apply(at, run, |number| number as f32);
    }

    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>) {
        self.apply(at, run, |number| number);
    }

    // The rule multiplies its rate by `ApplyAt::rate`, so the rate can be scaled per variable and
    // stale gradients can be damped.
    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        let betas = [("beta1", self.beta1), ("beta2", self.beta2)];
        let betas = betas.into_iter().find(|(_, beta)| !(0.0..1.0).contains(beta));
        betas.map(|(name, beta)| (name, beta, "it must be at least 0 and below 1"))
    }
}

/// The points: position and height.
fn points() -> impl Iterator<Item = ([f32; 2], f32)> {
    let at = |index: u8| f32::from(index) / 2.0 - 1.0;
    let grid = (0..25).map(move |index| [at(index / 5), at(index % 5)]);
    grid.map(|[x, y]| ([x, y], 2.0 * x - 3.0 * y + 0.5))
}

/// Returns the mean squared error of a plane and its gradient by slope and height.
fn loss(slope: &[f32], height: f32) -> (f32, [f32; 3]) {
    let mut loss = 0.0;
    let mut gradient = [0.0; 3];
    for ([x, y], z) in points() {
        let error = slope[0] * x + slope[1] * y + height - z;
        loss += error * error / 25.0;
        for (sum, input) in gradient.iter_mut().zip([x, y, 1.0]) {
            *sum += 2.0 * error * input / 25.0;
        }
    }
    (loss, gradient)
}

const STEPS: u64 = 500;
const WARM_UP: u64 = 10;

/// Trains, and returns the loss of the last step.
///
/// # Errors
/// Any error of the server or the worker.
pub(crate) async fn train() -> Result<f32, Box<dyn Error>> {
    // Every step of Lion has the length of the rate, so the rate must fall for the values to
    // converge.
    let rule = || Lion::new(Schedule::cosine(0.05, 0.0, STEPS - WARM_UP).warm_up(WARM_UP));
    let cluster = Cluster::start(1, 1, |cluster, task| {
        PsConfig::new(cluster, task, rule()).last_step(STEPS)
    })?;

    let mut worker = Worker::connect(cluster.worker_config(0)).await?;
    let variables = [VariableSpec::f32("slope", [2])?, VariableSpec::f32("height", [1])?];
    let mut params = worker.join(&variables, |_| ()).await?;
    let mut last = f32::NAN;
    while let Some(token) = worker.token().await? {
        worker.pull(&token, &mut params).await?;
        let [slope, height] = params.views::<f32, 2>(["slope", "height"])?;
        let (loss, [x, y, z]) = loss(slope, height[0]);
        let mut gradients = worker.gradients();
        gradients.view_mut("slope")?.copy_from_slice(&[x, y]);
        gradients.view_mut("height")?.copy_from_slice(&[z]);
        worker.push(token, gradients).await?;
        last = loss;
    }
    worker.leave().await?;
    cluster.stop()?;
    Ok(last)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let loss = train().await?;
    println!("{{\"rule\":\"lion\",\"steps\":{STEPS},\"loss\":{loss:e}}}");
    Ok(())
}
