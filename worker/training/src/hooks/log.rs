//! [`Log`]: lines about a training.

use std::fmt::{self, Write};
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_worker::{Error, SavedCheckpoint};

use crate::cadence::Cadence;
use crate::{
    FinalValues, FinishedStep, Flow, GradientOutcome, Hook, HookError, JoinReport, TrainingError,
};

/// Writes lines about a training to a function of the caller: the scalars of a step now and then,
/// gradients that did not count, joins after a loss, checkpoints, and the end.
///
/// ```
/// use pushpull_training::hooks::Log;
///
/// let log = Log::every_steps(100, |line| eprintln!("{line}"));
/// ```
///
/// The library itself writes nothing anywhere.
#[doc(alias = "LoggingTensorHook")]
pub struct Log {
    interval: Cadence,
    /// The step and the time of the last line about a step.
    last: Option<(u64, Duration)>,
    write: Box<dyn FnMut(&str) + Send>,
    line: String,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("interval", &self.interval).finish_non_exhaustive()
    }
}

impl Log {
    /// Writes a line at the first step, and then every `steps` global steps.
    pub fn every_steps(steps: u64, write: impl FnMut(&str) + Send + 'static) -> Log {
        Log::new(Cadence::Steps(steps), write)
    }

    /// Writes a line at the first step, and then once per interval.
    pub fn every(interval: Duration, write: impl FnMut(&str) + Send + 'static) -> Log {
        Log::new(Cadence::Time(interval), write)
    }

    fn new(interval: Cadence, write: impl FnMut(&str) + Send + 'static) -> Log {
        Log { interval, last: None, write: Box::new(write), line: String::new() }
    }

    fn is_due(&self, step: u64, at: Duration) -> bool {
        self.last.is_none_or(|(last, since)| {
            self.interval.is_due(at.saturating_sub(since), step.saturating_sub(last))
        })
    }

    /// Writes one line. Its memory is reused.
    fn write(&mut self, line: fmt::Arguments<'_>) {
        self.line.clear();
        // A string takes any text.
        let _ = self.line.write_fmt(line);
        (self.write)(&self.line);
    }
}

impl Hook for Log {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        if at.has_gone_back() {
            self.last = None;
        }
        match (at.from_step, at.cause) {
            (None, _) => self.write(format_args!("joined at step {}", at.step)),
            (Some(from), None) => {
                self.write(format_args!("joined again at step {}, after step {from}", at.step));
            }
            (Some(from), Some(cause)) => self.write(format_args!(
                "joined again at step {}, after step {from}: {}",
                at.step,
                Chain(cause)
            )),
        }
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let at = step.global_step;
        match step.outcome {
            GradientOutcome::Skipped(error) => {
                self.write(format_args!("step {at}: a batch is skipped: {}", Chain(error)));
            }
            GradientOutcome::Lost(error) => {
                self.write(format_args!("step {at}: the servers are lost: {}", Chain(error)));
            }
            GradientOutcome::Pushed(_) | GradientOutcome::Withheld => {}
        }
        if self.is_due(at, step.at) {
            self.last = Some((at, step.at));
            self.line.clear();
            let _ = write!(self.line, "step {at}");
            for (index, (name, value)) in step.scalars.iter().enumerate() {
                let separator = if index == 0 { ": " } else { ", " };
                let _ = write!(self.line, "{separator}{name} {value}");
            }
            (self.write)(&self.line);
        }
        Ok(Flow::Continue)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint) -> Result<Flow, HookError> {
        let SavedCheckpoint { name, step, .. } = checkpoint;
        self.write(format_args!("saved the checkpoint {name} of step {step}"));
        Ok(Flow::Continue)
    }

    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        self.write(format_args!("{}", Chain(error)));
        Ok(Flow::Continue)
    }

    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        self.write(format_args!("ended at step {}: {}", at.end.step, at.end.reason));
        Ok(())
    }

    fn failed(&mut self, error: &TrainingError) {
        self.write(format_args!("failed: {}", Chain(error)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::lifecycle::tests::Script;

    /// Plays a training with a log, and returns its lines.
    fn lines(script: Script, log: impl FnOnce(Box<dyn FnMut(&str) + Send>) -> Log) -> Vec<String> {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = lines.clone();
        let write = Box::new(move |line: &str| sink.lock().unwrap().push(line.to_owned()));
        let _ = script.play(vec![Box::new(log(write))]);
        lines.lock().unwrap().clone()
    }

    #[test]
    fn lines_are_written_after_steps_or_seconds() {
        let script =
            || Script { last_step: 6, loss: |step| step as f64 / 2.0, ..Script::default() };
        let expected = [
            "joined at step 0",
            "step 1: loss 0",
            "step 4: loss 1.5",
            "ended at step 6: the last step is reached",
        ];
        assert_eq!(lines(script(), |write| Log::every_steps(3, write)), expected);
        let three = Duration::from_secs(3);
        assert_eq!(lines(script(), |write| Log::every(three, write)), expected);
    }

    #[test]
    fn losses_and_failures_are_written_at_once() {
        let mut script = Script { last_step: 9, fails_at: Some(4), ..Script::default() };
        let overflow =
            Error::Overflow { variable: "w".to_owned(), element: 3, value: f64::INFINITY };
        script.faults = vec![
            ("push", 2, overflow),
            ("push", 4, Error::RolledBack { from_step: 2, to_step: 1 }),
        ];
        script.joins = [Ok((0, false)), Ok((1, true))].into();
        assert_eq!(
            lines(script, |write| Log::every_steps(100, write)),
            [
                "joined at step 0",
                "step 1: loss 1",
                "step 1: a batch is skipped: cannot push: element 3 of \"w\" would become inf",
                "step 2: the servers are lost: cannot continue: a checkpoint was restored, training \
                 resumes at step 1, and the newest step known to this worker was 2",
                "joined again at step 1, after step 2: cannot continue: a checkpoint was restored, \
                 training resumes at step 1, and the newest step known to this worker was 2",
                "step 2: loss 1",
                "failed: cannot compute a gradient for step 4: no more data",
            ]
        );
    }
}
