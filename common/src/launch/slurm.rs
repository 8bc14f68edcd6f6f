//! [`SlurmStep`]: the step of a Slurm job, and the place of a task in it.

use super::error::clip;
use super::place::{Place, check_equal, number};
use super::rows::Row;
use super::{LaunchError, Lookup};

/// The step of a Slurm job that this process, or an ancestor of it, is a task of.
pub(super) struct SlurmStep {
    /// `job.step`: the id that Slurm's PMI plugins pass.
    id: String,
    /// How often Slurm has requeued the job. The steps of each run have the same ids.
    restarts: Option<String>,
}

impl SlurmStep {
    /// Reads the step. The batch script and the shell of `salloc` are in none.
    pub(super) fn read(lookup: Lookup<'_>) -> Option<SlurmStep> {
        let job = lookup("SLURM_JOB_ID").filter(|job| !job.is_empty())?;
        let step = lookup("SLURM_STEP_ID").filter(|step| !step.is_empty())?;
        // A shell of `salloc` may be a step with a reserved id. It has SLURM_NTASKS of the job.
        let is_reserved = step.parse::<u32>().is_ok_and(|step| step > STEP_ID_MAX);
        let restarts = lookup("SLURM_RESTART_COUNT").filter(|count| !count.is_empty());
        (!is_reserved).then(|| SlurmStep { id: format!("{job}.{step}"), restarts })
    }

    /// Returns an id that differs for each run of a requeued job.
    pub(super) fn attempt_id(&self) -> String {
        match &self.restarts {
            None => self.id.clone(),
            Some(restarts) => format!("{}.{restarts}", self.id),
        }
    }

    /// Reads the place of this task, if its rank is set.
    pub(super) fn place(&self, lookup: Lookup<'_>) -> Result<Option<Place>, LaunchError> {
        let Some(mut place) = Row::SLURM.read(lookup)? else {
            return Ok(None);
        };
        self.check_pmi(lookup, &place)?;
        place.local_size = local_size(lookup, &place)?;
        Ok(Some(place))
    }

    /// Checks that PMI and PMIx of this step pass the same place. A step inherits the variables of
    /// the step that started it, which are of another place.
    fn check_pmi(&self, lookup: Lookup<'_>, place: &Place) -> Result<(), LaunchError> {
        let is_pmi = lookup("PMI_JOBID").is_some_and(|job| job == self.id);
        let namespace = format!("slurm.pmix.{}", self.id);
        let is_pmix = lookup("PMIX_NAMESPACE").is_some_and(|job| job == namespace);
        let rank = ("SLURM_PROCID", place.rank);
        let size = ("SLURM_NTASKS", place.size);
        let pairs =
            [(is_pmi, rank, "PMI_RANK"), (is_pmi, size, "PMI_SIZE"), (is_pmix, rank, "PMIX_RANK")];
        for (is_of_step, slurm, pmi) in pairs {
            if is_of_step && let Some(pmi) = number(lookup, pmi)? {
                check_equal(slurm, pmi)?;
            }
        }
        Ok(())
    }
}

/// Checks that a process outside any step is not one of several tasks.
pub(super) fn check_alone(lookup: Lookup<'_>) -> Result<(), LaunchError> {
    let Some(job) = lookup("SLURM_JOB_ID") else {
        return Ok(());
    };
    match number(lookup, "SLURM_NTASKS")? {
        Some((_, tasks)) if tasks > 1 => Err(LaunchError::OutsideStep { job: clip(&job), tasks }),
        _ => Ok(()),
    }
}

/// Returns the number of tasks on this node, if Slurm passes both the list and the node.
fn local_size(lookup: Lookup<'_>, place: &Place) -> Result<Option<u32>, LaunchError> {
    let Some((_, node)) = number(lookup, "SLURM_NODEID")? else {
        return Ok(None);
    };
    let Some(list) = lookup("SLURM_STEP_TASKS_PER_NODE") else {
        return Ok(None);
    };
    let local_rank = place.local_rank.unwrap_or(0);
    let tasks = tasks_on_node(&list, node)?;
    match tasks.filter(|&tasks| local_rank < tasks && tasks <= place.size) {
        None => Err(LaunchError::NoSuchTask { value: clip(&list), node, local_rank }),
        tasks => Ok(tasks),
    }
}

/// Returns the number of tasks on a node by a list such as `2(x3),1`: two on each of three nodes,
/// then one.
fn tasks_on_node(list: &str, node: u32) -> Result<Option<u32>, LaunchError> {
    let mut first = 0u64;
    let mut found = None;
    for (tasks, nodes) in task_runs(list)? {
        // The list is as long as an environment allows, so the sum of 32-bit numbers stays in range.
        let end = first + u64::from(nodes);
        if (first..end).contains(&u64::from(node)) {
            found = Some(tasks);
        }
        first = end;
    }
    Ok(found)
}

/// Reads a list such as `2(x3),1` as runs of tasks on each node and the number of such nodes.
pub(crate) fn task_runs(list: &str) -> Result<Vec<(u32, u32)>, LaunchError> {
    let malformed = || LaunchError::TasksPerNode { value: clip(list) };
    list.split(',').map(|run| read_run(run).ok_or_else(malformed)).collect()
}

/// Reads `2(x3)` as two tasks on each of three nodes, and `2` as two on one.
fn read_run(run: &str) -> Option<(u32, u32)> {
    match run.split_once("(x") {
        None => Some((digits(run)?, 1)),
        Some((tasks, nodes)) => Some((digits(tasks)?, digits(nodes.strip_suffix(')')?)?)),
    }
}

fn digits(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// The highest id of a step that `srun` starts: `SLURM_MAX_NORMAL_STEP_ID` of `slurm.h`.
const STEP_ID_MAX: u32 = 0xffff_fff0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_tasks_are_runs_of_nodes() {
        let table = [
            ("4", [Some(4), None, None, None]),
            ("2(x2),1", [Some(2), Some(2), Some(1), None]),
            ("1,3(x1),2", [Some(1), Some(3), Some(2), None]),
            ("1(x4294967295),2(x4294967295)", [Some(1); 4]),
            ("0(x2),1", [Some(0), Some(0), Some(1), None]),
        ];
        for (list, expected) in table {
            for (node, expected) in (0..).zip(expected) {
                assert_eq!(tasks_on_node(list, node), Ok(expected), "{list}, node {node}");
            }
        }
        assert_eq!(tasks_on_node("1(x4294967295),2(x4294967295)", u32::MAX), Ok(Some(2)));
        let malformed = [
            "",
            ",",
            "2,",
            "2(x)",
            "2(x3",
            "2(3)",
            "(x3)",
            "+2",
            "-1",
            "2(x+3)",
            "2 ",
            "4294967296",
        ];
        for list in malformed {
            let error = tasks_on_node(list, 0).unwrap_err();
            assert_eq!(error, LaunchError::TasksPerNode { value: list.to_owned() });
        }
    }
}
