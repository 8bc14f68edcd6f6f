//! [`HookList`]: calls hooks in order, and contains their failures.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::hook::{
    ComputedStep, FinishedStep, Flow, GrantedStep, Hook, HookError, JoinReport, RetryReport,
    StepGate, TrainingSetup,
};
use super::training_end::{FinalValues, StopReason};
use super::training_error::{HookPlace, TrainingError};
use pushpull_common::panic_message::message_of;
use pushpull_worker::{Error, SavedCheckpoint};

/// The hooks of a training, in the order of their calls.
///
/// Invariants: a hook is called only after its `begin` has succeeded. Each such hook hears of the
/// end exactly once, by `end` or `failed`, unless it failed itself: a hook that has returned an
/// error or panicked is never called again.
#[derive(Default)]
pub(super) struct HookList {
    hooks: Vec<HookEntry>,
}

struct HookEntry {
    hook: Box<dyn Hook>,
    name: String,
    is_called: bool,
}

impl fmt::Debug for HookList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.hooks.iter().map(|entry| &entry.name)).finish()
    }
}

/// The answer of all hooks before a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GateAnswer {
    Begin,
    Wait(std::time::Duration),
    Stop(StopReason),
}

impl HookList {
    pub(super) fn new(hooks: Vec<Box<dyn Hook>>) -> HookList {
        let entry = |hook: Box<dyn Hook>| HookEntry {
            name: hook.name().to_owned(),
            hook,
            is_called: false,
        };
        HookList { hooks: hooks.into_iter().map(entry).collect() }
    }

    pub(super) fn begin(&mut self, setup: &mut TrainingSetup<'_>) -> Result<(), TrainingError> {
        for entry in &mut self.hooks {
            entry.is_called = true;
            entry.call(HookPlace::Begin, |hook| hook.begin(setup))?;
        }
        Ok(())
    }

    pub(super) fn joined(
        &mut self,
        at: &JoinReport<'_>,
    ) -> Result<Option<StopReason>, TrainingError> {
        self.flow(HookPlace::Joined, |hook| hook.joined(at))
    }

    /// The hooks behind one that does not let the step begin are not called.
    pub(super) fn before_step(&mut self, step: &GrantedStep) -> Result<GateAnswer, TrainingError> {
        for entry in self.called() {
            match entry.call(HookPlace::BeforeStep, |hook| hook.before_step(step))? {
                StepGate::Begin => {}
                StepGate::Wait(pause) => return Ok(GateAnswer::Wait(pause)),
                StepGate::Stop(reason) => return Ok(GateAnswer::Stop(entry.reason(reason))),
            }
        }
        Ok(GateAnswer::Begin)
    }

    /// The hooks behind one that withholds the push are not called.
    pub(super) fn before_push(
        &mut self,
        step: &ComputedStep<'_>,
    ) -> Result<Option<StopReason>, TrainingError> {
        for entry in self.called() {
            match entry.call(HookPlace::BeforePush, |hook| hook.before_push(step))? {
                Flow::Continue => {}
                Flow::Stop(reason) => return Ok(Some(entry.reason(reason))),
            }
        }
        Ok(None)
    }

    pub(super) fn after_step(
        &mut self,
        step: &mut FinishedStep<'_>,
    ) -> Result<Option<StopReason>, TrainingError> {
        self.flow(HookPlace::AfterStep, |hook| hook.after_step(step))
    }

    pub(super) fn saved(
        &mut self,
        checkpoint: &SavedCheckpoint,
    ) -> Result<Option<StopReason>, TrainingError> {
        self.flow(HookPlace::Saved, |hook| hook.saved(checkpoint))
    }

    pub(super) fn save_failed(
        &mut self,
        error: &Error,
    ) -> Result<Option<StopReason>, TrainingError> {
        self.flow(HookPlace::SaveFailed, |hook| hook.save_failed(error))
    }

    pub(super) fn retrying(
        &mut self,
        retry: &RetryReport,
    ) -> Result<Option<StopReason>, TrainingError> {
        self.flow(HookPlace::Retrying, |hook| hook.retrying(retry))
    }

    pub(super) fn end(&mut self, at: &FinalValues<'_>) -> Result<(), TrainingError> {
        for entry in self.called() {
            entry.call(HookPlace::End, |hook| hook.end(at))?;
            // It has heard of the end.
            entry.is_called = false;
        }
        Ok(())
    }

    /// Tells the hooks that have not heard of the end yet.
    pub(super) fn failed(&mut self, error: &TrainingError) {
        for entry in self.called() {
            entry.is_called = false;
            // The training has failed already, with the error that is reported.
            let _ = catch_unwind(AssertUnwindSafe(|| entry.hook.failed(error)));
        }
    }

    /// Calls all hooks, and returns the first reason to stop.
    fn flow(
        &mut self,
        place: HookPlace,
        mut call: impl FnMut(&mut dyn Hook) -> Result<Flow, HookError>,
    ) -> Result<Option<StopReason>, TrainingError> {
        let mut stop = None;
        for entry in self.called() {
            if let Flow::Stop(reason) = entry.call(place, &mut call)? {
                stop.get_or_insert_with(|| entry.reason(reason));
            }
        }
        Ok(stop)
    }

    fn called(&mut self) -> impl Iterator<Item = &mut HookEntry> {
        self.hooks.iter_mut().filter(|entry| entry.is_called)
    }
}

impl HookEntry {
    /// Calls a method. If it fails, the hook is not called again.
    fn call<R>(
        &mut self,
        place: HookPlace,
        call: impl FnOnce(&mut dyn Hook) -> Result<R, HookError>,
    ) -> Result<R, TrainingError> {
        // What a panic leaves behind in the hook is not seen: it is not called again.
        match catch_unwind(AssertUnwindSafe(|| call(&mut *self.hook))) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(source)) => {
                self.is_called = false;
                Err(self.failure(place, source))
            }
            Err(panic) => {
                self.is_called = false;
                let hook = self.name.clone();
                let message = message_of(&*panic);
                Err(TrainingError::HookPanicked { hook, place, message })
            }
        }
    }

    /// Returns the error of a hook that has failed. A function of the program that panicked is named
    /// as everywhere else, whichever hook has called it.
    fn failure(&self, place: HookPlace, source: HookError) -> TrainingError {
        match source.downcast_ref::<Error>() {
            Some(error @ Error::Panicked { .. }) => TrainingError::Worker(error.clone()),
            _ => TrainingError::Hook { hook: self.name.clone(), place, source },
        }
    }

    fn reason(&self, reason: String) -> StopReason {
        StopReason::Hook { hook: self.name.clone(), reason }
    }
}
