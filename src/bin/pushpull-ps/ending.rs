//! The end of the daemon: the signals that end it, and the summary it prints.

use std::io;
use std::task::Poll;

use pushpull::server::Metrics;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::shared::fail_writes_instead;

/// The signals that end the daemon. They are handled from its start on.
pub(crate) struct Signals(Vec<Signal>);

impl Signals {
    /// Handles SIGINT, SIGTERM, and SIGHUP unless that is already ignored, as under `nohup`.
    pub(crate) fn watch() -> io::Result<Signals> {
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        // If /proc does not say whether SIGHUP is ignored, its disposition is left alone.
        let status = std::fs::read_to_string("/proc/self/status");
        if status.is_ok_and(|status| !ignores_hangup(&status)) {
            kinds.push(SignalKind::hangup());
        }
        fail_writes_instead()?;
        kinds.into_iter().map(signal).collect::<Result<_, _>>().map(Signals)
    }

    /// Completes when one of the signals has arrived.
    pub(crate) async fn any(&mut self) {
        std::future::poll_fn(|context| {
            let came = self.0.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if came { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// Returns whether a process ignores SIGHUP, from the text of its `/proc/PID/status`: bit 0 of the
/// `SigIgn` mask is SIGHUP. Without such a mask SIGHUP counts as ignored.
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask & 1 == 1)
}

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
        let (pulls, duplicates) = (all.pulls, all.duplicates);
        format!("task {task} is done{step}: {applied}, {pulls} pulls, {duplicates} duplicates")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_steps_in_synchronous_mode_and_gradients_in_asynchronous_mode() {
        let mut shards = [Metrics::default(), Metrics::default()];
        (shards[0].steps_applied, shards[1].steps_applied) = (7, 8);
        let mut all = Metrics::default();
        (all.global_step, all.steps_applied, all.gradients_admitted) = (20, 15, 16);
        (all.gradients_applied, all.pulls, all.duplicates) = (3, 4, 1);
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
    fn the_first_bit_of_the_signal_mask_is_the_hangup() {
        let status = |mask| format!("Name:\tx\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n");
        assert!(ignores_hangup(&status("0000000000001001")));
        assert!(!ignores_hangup(&status("0000000000001000")));
        assert!(ignores_hangup("Name:\tx\n"));
    }
}
