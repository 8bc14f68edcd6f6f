//! [`Summaries`]: the scalars of some steps, for a writer.

use std::io::Write;
use std::time::Duration;

use crate::cadence::Cadence;
use crate::summary::SummaryWriter;
use crate::{FinalValues, FinishedStep, Flow, Hook, HookError, JoinReport, Scalars};

/// Takes the scalars of steps, for example a writer of event files.
pub trait ScalarSink: Send {
    /// Takes the scalars of a global step.
    fn write(&mut self, step: u64, scalars: &Scalars) -> Result<(), HookError>;

    /// Writes out what is buffered. Called at the end, and after a checkpoint. Default: nothing.
    fn flush(&mut self) -> Result<(), HookError> {
        Ok(())
    }
}

/// Event files for TensorBoard. An error of a write fails the training.
impl<W: Write + Send> ScalarSink for SummaryWriter<W> {
    fn write(&mut self, step: u64, scalars: &Scalars) -> Result<(), HookError> {
        for (name, value) in scalars.iter() {
            self.scalar(step, name, value)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HookError> {
        Ok(SummaryWriter::flush(self)?)
    }
}

/// Gives the scalars of every few steps or seconds to a [`ScalarSink`], such as a
/// [`SummaryWriter`]. An error of the sink fails the training.
#[derive(Debug)]
#[doc(alias = "SummarySaverHook")]
pub struct Summaries<S> {
    interval: Cadence,
    /// The step that was last written, and its time.
    last: Option<(u64, Duration)>,
    sink: S,
}

impl<S: ScalarSink> Summaries<S> {
    /// Writes at the first step, and then every `steps` global steps.
    pub fn every_steps(steps: u64, sink: S) -> Summaries<S> {
        Summaries { interval: Cadence::Steps(steps), last: None, sink }
    }

    /// Writes at the first step, and then once per interval.
    pub fn every(interval: Duration, sink: S) -> Summaries<S> {
        Summaries { interval: Cadence::Time(interval), last: None, sink }
    }

    fn is_due(&self, step: u64, at: Duration) -> bool {
        self.last.is_none_or(|(last, since)| {
            self.interval.is_due(at.saturating_sub(since), step.saturating_sub(last))
        })
    }
}

impl<S: ScalarSink> Hook for Summaries<S> {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        if at.has_gone_back() {
            self.last = None;
        }
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let at = step.global_step;
        if self.is_due(at, step.at) {
            self.last = Some((at, step.at));
            self.sink.write(at, step.scalars)?;
        }
        Ok(Flow::Continue)
    }

    fn saved(&mut self, _: &pushpull_worker::SavedCheckpoint) -> Result<Flow, HookError> {
        self.sink.flush()?;
        Ok(Flow::Continue)
    }

    fn end(&mut self, _: &FinalValues<'_>) -> Result<(), HookError> {
        self.sink.flush()
    }

    fn failed(&mut self, _: &crate::TrainingError) {
        // The training fails with another error already.
        let _ = self.sink.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use pushpull_common::error::Chain;

    use super::*;
    use crate::lifecycle::tests::Script;
    use crate::summary::SummaryConfig;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<String>>>);

    impl ScalarSink for Written {
        fn write(&mut self, step: u64, scalars: &Scalars) -> Result<(), HookError> {
            if step == 7 {
                return Err("the disk is full".into());
            }
            self.0.lock().unwrap().push(format!("{step} {:?}", scalars.get("loss")));
            Ok(())
        }

        fn flush(&mut self) -> Result<(), HookError> {
            self.0.lock().unwrap().push("flush".to_owned());
            Ok(())
        }
    }

    #[test]
    fn a_summary_writer_takes_the_scalars() {
        let folder = tempfile::tempdir().unwrap();
        let writer = SummaryWriter::create(folder.path(), SummaryConfig::new()).unwrap();
        let path = writer.path().to_owned();
        let script = Script { last_step: 5, ..Script::default() };
        script.play(vec![Box::new(Summaries::every_steps(2, writer))]).ended.unwrap();
        let bytes = std::fs::read(path).unwrap();
        let tags = bytes.windows(4).filter(|window| window == b"loss").count();
        assert_eq!(tags, 3, "steps 1, 3 and 5");
    }

    #[test]
    fn scalars_are_written_by_the_interval_and_flushed_at_the_end() {
        // A step takes a second.
        for every in [
            |sink| Summaries::every_steps(3, sink),
            |sink| Summaries::every(Duration::from_secs(3), sink),
        ] {
            let written = Written::default();
            let script = Script { last_step: 5, loss: |step| step as f64, ..Script::default() };
            let played = script.play(vec![Box::new(every(written.clone()))]);
            assert!(played.ended.is_ok());
            let lines = written.0.lock().unwrap().clone();
            assert_eq!(lines, ["1 Some(0.0)", "4 Some(3.0)", "flush"]);
        }
        let written = Written::default();
        let script = Script { last_step: 9, ..Script::default() };
        let played = script.play(vec![Box::new(Summaries::every_steps(3, written))]);
        let error = Chain(&played.ended.unwrap_err()).to_string();
        assert!(error.ends_with("Summaries failed in after_step: the disk is full"), "{error}");
    }
}
