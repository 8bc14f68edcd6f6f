//! Training progress: a bar on a terminal, a few plain lines otherwise.

use std::fmt;
use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use pushpull::error::{Chain, TrainingError};
use pushpull::training::{FinalValues, FinishedStep, Flow, Hook, HookError, JoinReport};
use pushpull::worker::{RestoredCheckpoint, SavedCheckpoint};

use super::output::print_error;

/// A hook that shows progress on stderr, so that results on stdout stay clean. Steps may arrive out
/// of order.
#[derive(Debug)]
pub(crate) struct Progress {
    total: u64,
    /// `Some` on a terminal only.
    bar: Option<ProgressBar>,
    /// The last tenth of the steps that was reported.
    tenth: u64,
}

impl Progress {
    /// Creates a display at step 0 of `total`.
    pub(crate) fn new(total: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(TEMPLATE);
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Progress { total, bar, tenth: 0 }
    }

    /// Reports that training has reached `step` with this loss. Without a terminal, prints about
    /// one line per tenth of the steps.
    fn at(&mut self, step: u64, loss: f64) {
        if let Some(bar) = &self.bar {
            if step > bar.position() {
                bar.set_position(step);
            }
            bar.set_message(format!("{loss:.4}"));
        } else if let Some(line) = self.line(step, loss) {
            print_error(format_args!("{line}"));
        }
    }

    /// Prints a line above the bar.
    fn print(&self, line: fmt::Arguments<'_>) {
        match &self.bar {
            Some(bar) => bar.suspend(|| print_error(line)),
            None => print_error(line),
        }
    }

    /// Returns the line for `step` if it is the first of its tenth.
    fn line(&mut self, step: u64, loss: f64) -> Option<String> {
        let tenth = u128::from(step) * 10 / u128::from(self.total.max(1));
        let tenth = u64::try_from(tenth).unwrap_or(u64::MAX).min(10);
        let reported = self.tenth;
        self.tenth = reported.max(tenth);
        (reported < tenth).then(|| format!("step {step} of {}, loss {loss:.4}", self.total))
    }
}

impl Hook for Progress {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        if let Some(bar) = &self.bar {
            bar.set_position(at.step);
        }
        if let Some(cause) = at.cause {
            self.print(format_args!("joined again at step {}: {}", at.step, Chain(cause)));
        } else if let Some(RestoredCheckpoint { name, step, .. }) = at.restored {
            self.print(format_args!("restored the checkpoint {name} of step {step}"));
        }
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        self.at(step.global_step, step.scalars.get("loss").unwrap_or(f64::NAN));
        Ok(Flow::Continue)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint) -> Result<Flow, HookError> {
        let SavedCheckpoint { name, step, .. } = checkpoint;
        self.print(format_args!("saved the checkpoint {name} of step {step}"));
        Ok(Flow::Continue)
    }

    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        if let Some(bar) = &self.bar {
            // The bar stays on the terminal as it is.
            bar.abandon();
        }
        print_error(format_args!("ended at step {}: {}", at.end.step, at.end.reason));
        Ok(())
    }

    fn failed(&mut self, _: &TrainingError) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

const TEMPLATE: &str = "[{elapsed_precise}] {bar:40} step {pos} of {len}, loss {msg}";

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(total: u64) -> Progress {
        Progress { total, bar: None, tenth: 0 }
    }

    #[test]
    fn every_tenth_is_reported_once() {
        let mut progress = plain(1000);
        let lines: Vec<String> = (0..=1000).filter_map(|step| progress.line(step, 0.5)).collect();
        assert_eq!(lines.len(), 10);
        assert_eq!(lines[0], "step 100 of 1000, loss 0.5000");
        assert_eq!(lines[9], "step 1000 of 1000, loss 0.5000");
    }

    #[test]
    fn steps_may_be_missing_or_out_of_order() {
        let mut progress = plain(100);
        assert_eq!(progress.line(57, f64::NAN).unwrap(), "step 57 of 100, loss NaN");
        assert_eq!(progress.line(31, 1.0), None);
        assert!(progress.line(100, 1.0).is_some());
        assert_eq!(progress.line(5000, 1.0), None);
    }

    #[test]
    fn a_total_of_few_or_no_steps_works() {
        let mut progress = plain(0);
        assert_eq!(progress.line(0, 1.0), None);
        assert!(progress.line(u64::MAX, 1.0).is_some());
        let mut progress = plain(3);
        assert_eq!((1..=3).filter_map(|step| progress.line(step, 1.0)).count(), 3);
        progress.at(0, 1.0);
    }
}
