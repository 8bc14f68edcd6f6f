//! The end of the daemon: the summary that it prints.

use pushpull::server::Metrics;

/// The task, its role and its mode, for the last line that it prints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkSummary {
    pub(crate) task: u32,
    pub(crate) owns_step: bool,
    pub(crate) synchronous: bool,
}

impl WorkSummary {
    /// Formats the line from the sums over all shards and the metrics of each shard.
    pub(crate) fn line(self, all: &Metrics, shards: &[Metrics]) -> String {
        let WorkSummary { task, owns_step, synchronous } = self;
        let step = if owns_step { format!(" at step {}", all.global_step) } else { String::new() };
        // Every shard applies every step; the step owner alone admits gradients.
        let steps = shards.iter().map(|shard| shard.steps_applied).max().unwrap_or(0);
        let applied = match (synchronous, owns_step) {
            (false, _) => format!("{} gradients", all.gradients_applied),
            (true, false) => format!("{steps} steps applied"),
            (true, true) => {
                format!("{steps} steps applied, {} gradients admitted", all.gradients_admitted)
            }
        };
        let pulls = all.pulls;
        let duplicates = all.duplicates;
        format!("task {task} is done{step}: {applied}, {pulls} pulls, {duplicates} duplicates")
    }
}

/// Returns the line about steps that no checkpoint has, from the name and the step of the newest one;
/// nothing if it has all of them.
pub(crate) fn unsaved_line(task: u32, step: u64, newest: Option<(&str, u64)>) -> Option<String> {
    let saved = newest.map_or(0, |(_, step)| step);
    let unsaved = step.checked_sub(saved).filter(|&unsaved| unsaved > 0)?;
    let newest = newest
        .map_or_else(|| "there is none".to_owned(), |(name, _)| format!("the newest is {name}"));
    Some(format!("task {task}: the last {unsaved} steps are in no checkpoint, {newest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_steps_in_synchronous_mode_and_gradients_in_asynchronous_mode() {
        let mut shards = [Metrics::default(), Metrics::default()];
        shards[0].steps_applied = 7;
        shards[1].steps_applied = 8;
        let mut all = Metrics::default();
        all.global_step = 20;
        all.steps_applied = 15;
        all.gradients_admitted = 16;
        all.gradients_applied = 3;
        all.pulls = 4;
        all.duplicates = 1;
        let line = |owns_step, synchronous| {
            WorkSummary { task: 5, owns_step, synchronous }.line(&all, &shards)
        };
        let end = "4 pulls, 1 duplicates";
        assert_eq!(
            line(true, true),
            format!("task 5 is done at step 20: 8 steps applied, 16 gradients admitted, {end}")
        );
        assert_eq!(line(false, true), format!("task 5 is done: 8 steps applied, {end}"));
        assert_eq!(line(true, false), format!("task 5 is done at step 20: 3 gradients, {end}"));
        assert_eq!(line(false, false), format!("task 5 is done: 3 gradients, {end}"));
    }

    #[test]
    fn steps_that_no_checkpoint_has_are_counted() {
        let line = |step, newest| unsaved_line(2, step, newest);
        let text = "task 2: the last 7 steps are in no checkpoint, ";
        assert_eq!(
            line(67, Some(("ckpt-1-60", 60))),
            Some(format!("{text}the newest is ckpt-1-60"))
        );
        assert_eq!(line(7, None), Some(format!("{text}there is none")));
        assert_eq!(line(60, Some(("ckpt-1-60", 60))), None);
        // Another cluster's checkpoint, or one of values that were never served.
        assert_eq!((line(5, Some(("ckpt-1-60", 60))), line(0, None)), (None, None));
    }
}
