//! In-graph replication: several towers compute the gradients of one update.

use pushpull_common::ids::TaskId;

use super::call::Call;
use super::error::ServiceError;
use super::function_client::FunctionClient;
use super::functions::{FunctionError, Functions};
use super::invocation::Invocation;
use super::outputs::Outputs;
use super::value::Value;

/// The name of a tower's output that has the gradients.
pub(crate) const GRADIENTS: &str = "gradients";
pub(crate) const LOSS: &str = "loss";

/// The name of the function that updates the variables.
const APPLY: &str = "apply_towers";

/// Synchronous in-graph replication: several towers compute the gradients of one update. One client
/// deals a batch out to towers on several tasks. The task of the first tower averages their
/// gradients, and pushes the mean once.
///
/// A tower is a function that computes gradients from [`Invocation::values`] and returns
/// [`Invocation::tower`]. Gradients go from task to task, not through the client. The tasks also
/// register [`Functions::towers`]. The parts of a batch are to be of equal size, because each tower
/// counts as much as every other.
///
/// For asynchronous towers call a function that pushes by itself, on each task.
///
/// ```no_run
/// use pushpull_common::ids::TaskId;
/// use pushpull_services::{FunctionClient, Towers, Value};
///
/// # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// # async fn run(client: FunctionClient, parts: [Vec<f32>; 2]) -> Result<()> {
/// let towers = Towers::new(&client, "tower", [0, 1].map(TaskId::worker))?;
/// let step = towers
///     .step(|tower, call| {
///         let x = Value::tensor(&[parts[tower].len() as u64], &parts[tower])?;
///         Ok(call.feed("x", x))
///     })
///     .await?;
/// println!("step {}: loss {}", step.step, step.loss);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Towers<'a> {
    client: &'a FunctionClient,
    function: String,
    tasks: Vec<TaskId>,
}

/// The result of one step of towers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TowerStep {
    /// The number of steps made, including this one.
    pub step: u64,
    /// Whether the mean is part of a step. Without it the servers have made the step of other
    /// clients before (synchronous mode), or the gradients were older than their bound
    /// (asynchronous mode).
    pub counted: bool,
    /// The mean of the losses of the towers.
    pub loss: f64,
}

impl<'a> Towers<'a> {
    /// Creates towers of a function, one on each of these tasks. A task may have several.
    ///
    /// # Errors
    /// [`ServiceError::Invalid`] for none, or more than 32.
    pub fn new(
        client: &'a FunctionClient,
        function: &str,
        tasks: impl IntoIterator<Item = TaskId>,
    ) -> Result<Towers<'a>, ServiceError> {
        let tasks: Vec<TaskId> = tasks.into_iter().collect();
        if !(1..=TOWERS_MAX).contains(&tasks.len()) {
            let reason = format!("{} towers, not 1 to {}", tasks.len(), TOWERS_MAX);
            return Err(ServiceError::Invalid { doing: format!("replicate {function:?}"), reason });
        }
        Ok(Towers { client, function: function.to_owned(), tasks })
    }

    /// Makes one step. `feed` gives each tower its part of the batch.
    ///
    /// # Errors
    /// The errors of the calls. If a tower fails, no variable is updated.
    pub async fn step(
        &self,
        mut feed: impl FnMut(usize, Call) -> Result<Call, ServiceError>,
    ) -> Result<TowerStep, ServiceError> {
        let mut towers = Vec::with_capacity(self.tasks.len());
        let mut apply = Call::new(APPLY).on(&self.tasks[0].to_string());
        for (tower, task) in self.tasks.iter().enumerate() {
            let call = feed(tower, Call::new(&self.function).on(&task.to_string()))?;
            let keeping = self.client.keep(call)?;
            apply = apply.kept(&format!("{GRADIENTS}.{tower}"), keeping.kept(), GRADIENTS).kept(
                &format!("{LOSS}.{tower}"),
                keeping.kept(),
                LOSS,
            );
            towers.push(keeping);
        }
        // The update waits for the towers where it runs, so a step is one round trip.
        let updated = self.client.call(apply).await;
        let outputs = match updated {
            Ok(outputs) => outputs,
            Err(error) => {
                // A tower that has failed says more than the update that waited for it.
                for tower in towers {
                    tower.await?;
                }
                return Err(error);
            }
        };
        step_of(&outputs)
    }
}

/// Returns the step that the outputs of the update describe.
fn step_of(outputs: &Outputs) -> Result<TowerStep, ServiceError> {
    let step = outputs.get("step")?.element::<i64>()? as u64;
    let counted = matches!(outputs.get("outcome")?.text()?, "applied" | "accepted");
    Ok(TowerStep { step, counted, loss: outputs.get(LOSS)?.element()? })
}

pub(crate) fn add_to(functions: Functions) -> Functions {
    functions.add(APPLY, apply)
}

/// Pushes the mean of the gradients of towers.
fn apply(call: &mut Invocation) -> Result<Outputs, FunctionError> {
    let mut values = Vec::new();
    let mut losses = Vec::new();
    while let Ok(value) = call.input(&format!("{GRADIENTS}.{}", values.len())) {
        losses.push(f64::from(call.input(&format!("{LOSS}.{}", values.len()))?.element::<f32>()?));
        values.push(value.clone());
    }
    if values.is_empty() {
        return Err(FunctionError::new("there are no towers"));
    }
    let mut mean = call.gradients()?;
    let parts: Vec<&[u8]> = values.iter().map(Value::as_bytes).collect();
    mean.set_mean_of_bytes(&parts)?;
    let share = 1.0 / values.len() as f64;
    let outputs = Outputs::from(call.push(mean)?);
    Ok(outputs.with(LOSS, losses.iter().sum::<f64>() * share))
}

/// The maximum number of towers.
const TOWERS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use pushpull_worker::Push;

    use super::*;

    #[test]
    fn a_step_counts_if_its_push_is_part_of_it() {
        let outcomes = [
            (Push::Applied { step: 7, staleness: 0 }, 7, true),
            (Push::Accepted { step: 7 }, 7, true),
            (Push::Stale { current: 8 }, 8, false),
            (Push::Withdrawn, 0, false),
        ];
        for (push, step, counted) in outcomes {
            let outputs = Outputs::from(push).with(LOSS, 0.5);
            assert_eq!(step_of(&outputs).unwrap(), TowerStep { step, counted, loss: 0.5 });
        }
    }
}
