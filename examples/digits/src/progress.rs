//! Training progress: a bar on a terminal, a few plain lines otherwise.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::print_error;

/// Shows progress on stderr, so that results on stdout stay clean. It may be shared between
/// threads, and steps may arrive out of order.
#[derive(Debug)]
pub(crate) struct Progress {
    total: u64,
    /// `Some` on a terminal only.
    bar: Option<ProgressBar>,
    /// The last tenth of the steps that was reported.
    tenth: AtomicU64,
}

impl Progress {
    /// Creates a display at step 0 of `total`.
    pub(crate) fn new(total: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(TEMPLATE);
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Progress { total, bar, tenth: AtomicU64::new(0) }
    }

    /// Reports that training has reached `step` with this loss. Without a terminal, prints about
    /// one line per tenth of the steps.
    pub(crate) fn at(&self, step: u64, loss: f32) {
        if let Some(bar) = &self.bar {
            if step > bar.position() {
                bar.set_position(step);
            }
            bar.set_message(format!("{loss:.4}"));
        } else if let Some(line) = self.line(step, loss) {
            print_error(format_args!("{line}"));
        }
    }

    /// Leaves the bar on the terminal as it is.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    /// Returns the line for `step` if it is the first of its tenth.
    fn line(&self, step: u64, loss: f32) -> Option<String> {
        let tenth = u128::from(step) * 10 / u128::from(self.total.max(1));
        let tenth = u64::try_from(tenth).unwrap_or(u64::MAX).min(10);
        let reported = self.tenth.fetch_max(tenth, Ordering::Relaxed);
        (reported < tenth).then(|| format!("step {step} of {}, loss {loss:.4}", self.total))
    }
}

const TEMPLATE: &str = "[{elapsed_precise}] {bar:40} step {pos} of {len}, loss {msg}";

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(total: u64) -> Progress {
        Progress { total, bar: None, tenth: AtomicU64::new(0) }
    }

    #[test]
    fn every_tenth_is_reported_once() {
        let progress = plain(1000);
        let lines: Vec<String> = (0..=1000).filter_map(|step| progress.line(step, 0.5)).collect();
        assert_eq!(lines.len(), 10);
        assert_eq!(lines[0], "step 100 of 1000, loss 0.5000");
        assert_eq!(lines[9], "step 1000 of 1000, loss 0.5000");
    }

    #[test]
    fn steps_may_be_missing_or_out_of_order() {
        let progress = plain(100);
        assert_eq!(progress.line(57, f32::NAN).unwrap(), "step 57 of 100, loss NaN");
        assert_eq!(progress.line(31, 1.0), None);
        assert!(progress.line(100, 1.0).is_some());
        assert_eq!(progress.line(5000, 1.0), None);
    }

    #[test]
    fn a_total_of_few_or_no_steps_works() {
        let progress = plain(0);
        assert_eq!(progress.line(0, 1.0), None);
        assert!(progress.line(u64::MAX, 1.0).is_some());
        let progress = plain(3);
        assert_eq!((1..=3).filter_map(|step| progress.line(step, 1.0)).count(), 3);
        progress.at(0, 1.0);
        progress.finish();
    }
}
