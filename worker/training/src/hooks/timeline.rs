//! [`Timeline`]: a trace of the phases of steps.

use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::time::Duration;

use crate::{FinalValues, FinishedStep, Flow, Hook, HookError, TrainingError, TrainingSetup};

/// Writes the phases of some steps in the JSON form of Chrome's trace viewer: the waits for token,
/// pull and push, and the computation between them. Open the file at `chrome://tracing` or in
/// Perfetto.
///
/// The process in the trace is the index of the worker task. Times count from the start of the
/// session.
#[doc(alias = "ProfilerHook")]
pub struct Timeline {
    steps: Range<u64>,
    output: Option<Box<dyn Write + Send>>,
    worker: u32,
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl Timeline {
    /// Writes the steps of this worker whose token has a global step in `steps`. The output is
    /// complete after the last of them, or at the end.
    pub fn new(steps: Range<u64>, output: impl Write + Send + 'static) -> Timeline {
        Timeline { steps, output: Some(Box::new(output)), worker: 0 }
    }

    fn write(&mut self, step: &FinishedStep<'_>) -> io::Result<()> {
        let Some(output) = &mut self.output else { return Ok(()) };
        let (timing, mut at) = (&step.timing, step.timing.begin);
        let phases = [
            ("token", timing.token),
            ("pull", timing.pull),
            ("compute", timing.compute),
            ("push", timing.push),
        ];
        for (name, length) in phases {
            writeln!(
                output,
                ",{{\"name\":\"{name}\",\"ph\":\"X\",\"ts\":{},\"dur\":{},\"pid\":{},\"tid\":0,\
                 \"args\":{{\"step\":{}}}}}",
                Microseconds(at),
                Microseconds(length),
                self.worker,
                step.step
            )?;
            at += length;
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let Some(mut output) = self.output.take() else { return Ok(()) };
        output.write_all(b"]\n")?;
        output.flush()
    }
}

impl Hook for Timeline {
    fn begin(&mut self, setup: &mut TrainingSetup<'_>) -> Result<(), HookError> {
        self.worker = setup.task.index;
        if let Some(output) = &mut self.output {
            writeln!(
                output,
                "[{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{0},\"args\":{{\"name\":\"worker \
                 {0}\"}}}}",
                self.worker
            )?;
        }
        Ok(())
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        if self.steps.contains(&step.step) {
            self.write(step)?;
        } else if step.step >= self.steps.end {
            self.finish()?;
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, _: &FinalValues<'_>) -> Result<(), HookError> {
        Ok(self.finish()?)
    }

    fn failed(&mut self, _: &TrainingError) {
        // The training fails with another error already.
        let _ = self.finish();
    }
}

/// A time in microseconds, with three decimals.
struct Microseconds(Duration);

impl fmt::Display for Microseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0.as_micros(), self.0.subsec_nanos() % 1_000)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::lifecycle::tests::Script;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn traced(script: Script, steps: Range<u64>) -> serde_json::Value {
        let output = Output::default();
        let _ = script.play(vec![Box::new(Timeline::new(steps, output.clone()))]);
        let bytes = output.0.lock().unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    #[test]
    fn a_trace_has_the_phases_of_its_steps() {
        for fails_at in [None, Some(5)] {
            let script = Script { last_step: 8, fails_at, ..Script::default() };
            let trace = traced(script, 2..4);
            let events = trace.as_array().unwrap();
            assert_eq!(events.len(), 1 + 2 * 4, "{trace}");
            assert_eq!(events[0]["args"]["name"], "worker 0");
            let names: Vec<_> = events[1..5].iter().map(|event| &event["name"]).collect();
            assert_eq!(names, ["token", "pull", "compute", "push"]);
            assert_eq!(
                (&events[1]["args"]["step"], &events[8]["args"]["step"]),
                (&2.into(), &3.into())
            );
        }
        let script = Script { last_step: 1, ..Script::default() };
        assert_eq!(traced(script, 5..9).as_array().unwrap().len(), 1);
    }

    #[test]
    fn times_are_microseconds() {
        let times =
            [(0, "0.000"), (999, "0.999"), (1_000, "1.000"), (2_000_000_017, "2000000.017")];
        for (nanoseconds, text) in times {
            assert_eq!(Microseconds(Duration::from_nanos(nanoseconds)).to_string(), text);
        }
    }
}
