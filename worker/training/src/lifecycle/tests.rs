//! The order of calls, over scripted results.

mod ending;
mod random;
mod replica_values;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use pushpull_common::error::Chain;
use pushpull_common::ids::{Sequence, ShardId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::wire::Text;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::simulation::{
    gradients_for, params_for, restored_checkpoint, saved_checkpoint,
};
use pushpull_worker::{Push, UnresponsiveShards};

use super::*;
use crate::cadence::Cadence;
use crate::hook::{Flow, HookError, RetryReport, StepGate};
use crate::training_error::HookPlace;

/// The events in their order: the calls of hooks, and the operations.
pub(crate) type EventLog = Arc<Mutex<Vec<String>>>;

/// The results of the operations. Those that a script does not name succeed.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) settings: LifecycleSettings,
    pub(crate) variables: Vec<VariableSpec>,
    /// The global step of the servers.
    pub(crate) step: u64,
    pub(crate) last_step: u64,
    /// The results of joins: the step that the servers have then, and whether it was restored.
    pub(crate) joins: VecDeque<Result<(u64, bool), Error>>,
    /// Results of the operations of one kind, each with the number of the call, from 1.
    pub(crate) faults: Vec<(&'static str, usize, Error)>,
    /// The user's function fails at this step.
    pub(crate) fails_at: Option<u64>,
    /// The interrupt is raised at this time.
    pub(crate) interrupt_at: Option<Duration>,
    pub(crate) log: EventLog,
    pub(crate) now: Duration,
    /// The loss of a step.
    pub(crate) loss: fn(u64) -> f64,
}

/// The result of a script.
pub(crate) struct Played {
    pub(crate) ended: Result<TrainingEnd, TrainingError>,
    pub(crate) events: Vec<String>,
    pub(crate) now: Duration,
}

impl Played {
    /// The steps of the checkpoints.
    fn saved(&self) -> Vec<u64> {
        let saved = self.events.iter().filter_map(|event| event.strip_prefix("save at "));
        saved.map(|step| step.parse().unwrap()).collect()
    }

    fn count(&self, event: &str) -> usize {
        self.events.iter().filter(|other| *other == event).count()
    }
}

impl Default for Script {
    fn default() -> Script {
        Script {
            settings: LifecycleSettings {
                is_chief: true,
                checkpoints: None,
                final_checkpoint_on_error: false,
                finish_for_all: false,
                ends_together: false,
                connect_timeout: Duration::from_secs(30),
                recover_for: Duration::from_secs(60),
                non_finite_max: 100,
                seed: 5,
            },
            variables: Vec::new(),
            step: 0,
            last_step: u64::MAX,
            joins: VecDeque::new(),
            faults: Vec::new(),
            fails_at: None,
            interrupt_at: None,
            log: EventLog::default(),
            now: Duration::ZERO,
            loss: |_| 1.0,
        }
    }
}

impl Script {
    /// Plays a training to its end. A step takes a second.
    pub(crate) fn play(mut self, hooks: Vec<Box<dyn Hook>>) -> Played {
        let mut lifecycle = Lifecycle::new(self.settings, hooks);
        let ended = match self.begin(&mut lifecycle) {
            Ok(()) => self.drive(&mut lifecycle),
            Err(error) => Err(error),
        };
        if ended.is_err() {
            // As `TrainingSession::wind_up` does.
            while lifecycle.next_action(self.now) != NextAction::Over {
                let action = lifecycle.next_action(self.now);
                assert!(!matches!(action, NextAction::Token | NextAction::Join { .. }));
                let _ = self.act(&mut lifecycle, action);
            }
        }
        let events = self.log.lock().unwrap().clone();
        Played { ended, events, now: self.now }
    }

    fn begin(&mut self, lifecycle: &mut Lifecycle) -> Result<(), TrainingError> {
        let task = pushpull_common::ids::TaskId::worker(0);
        let mut variables = self.variables.clone();
        let is_chief = self.settings.is_chief;
        lifecycle.begin(&mut TrainingSetup { variables: &mut variables, task: &task, is_chief })
    }

    fn drive(&mut self, lifecycle: &mut Lifecycle) -> Result<TrainingEnd, TrainingError> {
        for _ in 0..10_000 {
            if self.interrupt_at.is_some_and(|at| at <= self.now) {
                lifecycle.stop(StopReason::Interrupted);
            }
            match lifecycle.next_action(self.now) {
                NextAction::Over => {
                    return Ok(lifecycle.take_end().expect("the training has not failed"));
                }
                action => self.act(lifecycle, action)?,
            }
        }
        panic!("the training does not end: {:?}", self.log);
    }

    fn act(&mut self, lifecycle: &mut Lifecycle, action: NextAction) -> Result<(), TrainingError> {
        let gradients = gradients_for(variables());
        let mut params = params_for(variables(), self.step);
        match action {
            NextAction::Join { .. } => {
                self.note("join");
                match self.joins.pop_front().unwrap_or(Ok((self.step, false))) {
                    Err(error) => lifecycle.join_failed(self.now, error),
                    Ok((step, is_restored)) => {
                        self.step = step;
                        params = params_for(variables(), step);
                        let restored = restored_checkpoint("a checkpoint", step, 2);
                        let restored = is_restored.then_some(&restored);
                        lifecycle.joined(self.now, &params, restored)
                    }
                }
            }
            NextAction::Wait(pause) => {
                let interrupt_at = self.interrupt_at.unwrap_or(Duration::MAX);
                self.now = (self.now + pause).min(interrupt_at.max(self.now));
                Ok(())
            }
            NextAction::Average { steps } => {
                self.note(&format!("average {steps}"));
                let averaged = self.fault("average").map_or(Ok(()), Err);
                lifecycle.averaged(self.now, averaged)
            }
            NextAction::Publish => {
                self.note("publish");
                let published = self.fault("publish").map_or(Ok(()), Err);
                lifecycle.published(self.now, published)
            }
            NextAction::Save => {
                lifecycle.save_asked(self.now);
                self.note(&format!("save at {}", self.step));
                let saved = saved_checkpoint("", self.step);
                let answer = self.fault("save").map_or(Ok(saved), Err);
                lifecycle.saved(self.now, answer)
            }
            NextAction::AwaitSave => panic!("every save is answered at once"),
            NextAction::Token => {
                self.note("token");
                let ended = self.step >= self.last_step;
                let step = if ended { Err(StopReason::LastStep) } else { Ok(self.step) };
                let taken = self.fault("token").map_or(Ok(step), Err);
                lifecycle.token_taken(self.now, taken).map(|_| ())
            }
            NextAction::Pull => {
                let pulled = Ok(Pulled::Pulled { step: self.step });
                let pulled = self.fault("pull").map_or(pulled, Err);
                match lifecycle.pulled(self.now, pulled)? {
                    true => self.compute(lifecycle, &params, &gradients),
                    false => Ok(()),
                }
            }
            NextAction::Refresh { .. } => {
                self.note("refresh");
                let refreshed = self.fault("refresh").map_or(Ok(self.step), Err);
                lifecycle.refreshed(self.now, refreshed)
            }
            NextAction::End => {
                lifecycle.end(Some(params), WorkerMetrics::default(), &Scalars::default())
            }
            NextAction::Finish => {
                self.note("finish");
                let finished = self.fault("finish").map_or(Ok(()), Err);
                lifecycle.finished(self.now, finished)
            }
            NextAction::AwaitEnd => {
                self.note("await end");
                let ended = self.fault("await end").map_or(Ok(()), Err);
                lifecycle.end_awaited(self.now, ended)
            }
            NextAction::Leave => {
                self.note("leave");
                lifecycle.has_left();
                Ok(())
            }
            NextAction::Over => Ok(()),
        }
    }

    fn compute(
        &mut self,
        lifecycle: &mut Lifecycle,
        params: &Params,
        gradients: &Gradients,
    ) -> Result<(), TrainingError> {
        self.now += Duration::from_secs(1);
        if self.fails_at == Some(self.step) {
            let source = "no more data".into();
            return Err(lifecycle.fail(TrainingError::Step { step: self.step, source }));
        }
        let mut scalars = Scalars::default();
        scalars.set("loss", (self.loss)(self.step));
        if !lifecycle.before_push(self.now, params, gradients, &scalars)? {
            return Ok(());
        }
        self.note("push");
        let outcome = loop {
            match self.fault("push") {
                None => {
                    self.step += 1;
                    let applied = Push::Applied { step: self.step, staleness: 0 };
                    break GradientOutcome::Pushed(applied);
                }
                Some(error) => match lifecycle.push_failed(self.now, error)? {
                    PushRecovery::Ended(outcome) => break outcome,
                    PushRecovery::Resume(_, pause) => {
                        self.note("resume");
                        self.now += pause;
                    }
                },
            }
        };
        lifecycle.after_step(self.now, &outcome, params, &mut scalars, StepTiming::default())
    }

    /// Counts a call, and returns its fault.
    fn fault(&mut self, kind: &'static str) -> Option<Error> {
        let mut fault = None;
        self.faults.retain_mut(|(of, calls, error)| {
            *calls -= usize::from(*of == kind);
            let is_now = *of == kind && *calls == 0;
            fault = fault.take().or(is_now.then(|| error.clone()));
            !is_now
        });
        fault
    }

    fn note(&self, event: &str) {
        self.log.lock().unwrap().push(event.to_owned());
    }
}

fn variables() -> Vec<VariableSpec> {
    vec![VariableSpec::f32("w", [1]).unwrap()]
}

/// A hook that records its calls, and fails in one of them.
pub(crate) struct Recorder {
    name: &'static str,
    log: EventLog,
    fails_in: Option<(HookPlace, bool)>,
}

impl Recorder {
    pub(crate) fn boxed(name: &'static str, log: &EventLog) -> Box<dyn Hook> {
        Box::new(Recorder { name, log: log.clone(), fails_in: None })
    }

    fn at(&self, place: HookPlace) -> Result<(), HookError> {
        self.note(&place.to_string());
        match self.fails_in {
            Some((fails_in, true)) if fails_in == place => panic!("{} panics", self.name),
            Some((fails_in, false)) if fails_in == place => Err("it fails".into()),
            _ => Ok(()),
        }
    }

    fn note(&self, what: &str) {
        self.log.lock().unwrap().push(format!("{}.{what}", self.name));
    }
}

impl Hook for Recorder {
    fn name(&self) -> &str {
        self.name
    }

    fn begin(&mut self, _: &mut TrainingSetup<'_>) -> Result<(), HookError> {
        self.at(HookPlace::Begin)
    }

    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        if let Some(from) = at.from_step {
            self.note(&format!("rejoins {from} -> {}", at.step));
        }
        self.at(HookPlace::Joined).map(|()| Flow::Continue)
    }

    fn before_step(&mut self, _: &GrantedStep) -> Result<StepGate, HookError> {
        self.at(HookPlace::BeforeStep).map(|()| StepGate::Begin)
    }

    fn before_push(&mut self, _: &ComputedStep<'_>) -> Result<Flow, HookError> {
        self.at(HookPlace::BeforePush).map(|()| Flow::Continue)
    }

    fn after_step(&mut self, _: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        self.at(HookPlace::AfterStep).map(|()| Flow::Continue)
    }

    fn saved(&mut self, _: &SavedCheckpoint) -> Result<Flow, HookError> {
        self.at(HookPlace::Saved).map(|()| Flow::Continue)
    }

    fn save_failed(&mut self, _: &Error) -> Result<Flow, HookError> {
        self.at(HookPlace::SaveFailed).map(|()| Flow::Continue)
    }

    fn end(&mut self, _: &FinalValues<'_>) -> Result<(), HookError> {
        self.at(HookPlace::End)
    }

    fn retrying(&mut self, retry: &RetryReport) -> Result<Flow, HookError> {
        self.note(&format!("hears of {}", retry.cause));
        self.at(HookPlace::Retrying).map(|()| Flow::Continue)
    }

    fn failed(&mut self, _: &TrainingError) {
        self.note("failed");
    }
}

/// A hook made of a function, which ends the training or delays a step.
struct Gate(fn(u64) -> StepGate);

impl Hook for Gate {
    fn before_step(&mut self, step: &GrantedStep) -> Result<StepGate, HookError> {
        Ok((self.0)(step.step))
    }
}

const SHARD: ShardId = ShardId { task: 0, shard: 0 };

fn too_large() -> Refusal {
    Refusal::DoesNotFit { need: 2, limit: 1, made_of: Text::clipped("the variables") }
}

fn lost() -> Error {
    Error::StateLost { shard: SHARD }
}

fn timeout(sequence: Option<u64>) -> Error {
    let doing = "wait";
    let waited = Duration::from_secs(9);
    let sequence = sequence.map(Sequence);
    Error::Timeout { doing, waited, awaited: UnresponsiveShards::default(), sequence }
}

fn refused(refusal: Refusal) -> Error {
    Error::Refused { doing: "save a checkpoint", shard: SHARD, refusal }
}

pub(crate) fn busy() -> Error {
    refused(Refusal::Busy { what: Text::clipped("saves"), limit: 1 })
}

/// A script that saves checkpoints after this many steps.
pub(crate) fn saving(every: u64, last_step: u64) -> Script {
    let checkpoints = Some(Cadence::Steps(every));
    let settings = LifecycleSettings { checkpoints, ..Script::default().settings };
    Script { settings, last_step, ..Script::default() }
}

#[test]
fn hooks_are_called_in_the_recorded_order() {
    let script = Script { last_step: 2, ..saving(100, 2) };
    let hooks = vec![Recorder::boxed("a", &script.log), Recorder::boxed("b", &script.log)];
    let played = script.play(hooks);
    assert_eq!(
        played.events,
        [
            "a.begin",
            "b.begin",
            "join",
            "a.joined",
            "b.joined", // the start
            "save at 0",
            "a.saved",
            "b.saved", // after the join
            "token",
            "a.before_step",
            "b.before_step", // the first step
            "a.before_push",
            "b.before_push",
            "push",
            "a.after_step",
            "b.after_step", //
            "token",
            "a.before_step",
            "b.before_step", // the second
            "a.before_push",
            "b.before_push",
            "push",
            "a.after_step",
            "b.after_step", //
            "token",
            "await end",
            "refresh",
            "save at 2",
            "a.saved",
            "b.saved", // the end
            "a.end",
            "b.end",
            "leave",
        ]
    );
    let ended = played.ended.unwrap();
    assert_eq!((ended.step, ended.reason), (2, StopReason::LastStep));
    assert_eq!(ended.checkpoint.unwrap().step, 2);
}

/// Recorded from the classic system: an abort in the third run, and the end at step 4.
// T-7.
#[test]
fn a_recovery_joins_again_and_begins_once() {
    for (place, pushes) in [("token", 4), ("pull", 4), ("push", 5)] {
        let mut script = saving(100, 4);
        script.faults.push((place, 3, lost()));
        let hooks = vec![Recorder::boxed("a", &script.log)];
        let played = script.play(hooks);
        assert_eq!(played.ended.as_ref().unwrap().step, 4, "{place}");
        assert_eq!(played.saved(), [0, 2, 4], "{place}");
        for (event, count) in [
            ("join", 2),
            ("a.begin", 1),
            ("a.joined", 2),
            ("a.rejoins 2 -> 2", 1),
            ("push", pushes),
            ("a.end", 1),
            ("a.failed", 0),
            ("leave", 1),
        ] {
            assert_eq!(played.count(event), count, "{place}: {event} in {:?}", played.events);
        }
        assert!(played.now >= Duration::from_millis(4050), "no back-off: {:?}", played.now);
    }
}

#[test]
fn a_restore_is_reported_and_its_step_not_saved_again() {
    let mut script = saving(2, 5);
    script.faults.push(("push", 4, Error::RolledBack { from_step: 3, to_step: 2 }));
    script.joins = [Ok((0, false)), Ok((2, true))].into();
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!(played.saved(), [0, 2, 4, 5]);
    assert_eq!(played.count("a.rejoins 3 -> 2"), 1, "{:?}", played.events);
    assert_eq!(played.ended.unwrap().step, 5);
}

#[test]
fn an_error_of_the_caller_ends_without_the_final_checkpoint() {
    for (saves, steps) in [(false, &[0][..]), (true, &[0, 3])] {
        let mut script = saving(100, 9);
        script.settings.final_checkpoint_on_error = saves;
        script.fails_at = Some(3);
        let hooks = vec![Recorder::boxed("a", &script.log)];
        let played = script.play(hooks);
        let error = played.ended.as_ref().unwrap_err();
        assert_eq!(Chain(error).to_string(), "cannot compute a gradient for step 3: no more data");
        assert_eq!(played.saved(), steps);
        for (event, count) in [("a.end", 0), ("a.failed", 1), ("leave", 1)] {
            assert_eq!(played.count(event), count, "{event} in {:?}", played.events);
        }
    }
}

const PLACES: [HookPlace; 8] = [
    HookPlace::Begin,
    HookPlace::Joined,
    HookPlace::BeforeStep,
    HookPlace::BeforePush,
    HookPlace::AfterStep,
    HookPlace::Saved,
    HookPlace::SaveFailed,
    HookPlace::End,
];

// T-5.
#[test]
fn a_hook_that_fails_or_panics_anywhere_is_named_and_the_others_hear_of_it() {
    for (place, panics) in PLACES.into_iter().flat_map(|place| [(place, false), (place, true)]) {
        let mut script = saving(2, 3);
        script.faults.push(("save", 2, busy()));
        let log = script.log.clone();
        let fails = Recorder { name: "fails", log: log.clone(), fails_in: Some((place, panics)) };
        let before = Recorder::boxed("before", &log);
        let played = script.play(vec![before, Box::new(fails), Recorder::boxed("behind", &log)]);
        let error = played.ended.as_ref().unwrap_err();
        let expected = match panics {
            true => format!("the hook fails panicked in {place}: fails panics"),
            false => format!("the hook fails failed in {place}: it fails"),
        };
        assert!(Chain(error).to_string().ends_with(&expected), "{error}");
        let calls = |name: &str| {
            let calls = played.events.iter().filter_map(|event| event.strip_prefix(name));
            calls.filter_map(|call| call.strip_prefix('.')).collect::<Vec<_>>()
        };
        // The failed hook is not called again. A hook hears of the end once, if it has begun.
        assert_eq!(calls("fails").last(), Some(&&*place.to_string()), "{:?}", played.events);
        let has_begun = |name: &str| !calls(name).is_empty();
        for name in ["before", "behind"] {
            let ends = calls(name).iter().filter(|call| ["end", "failed"].contains(call)).count();
            assert_eq!(ends, usize::from(has_begun(name)), "{place}: {:?}", played.events);
        }
        assert_eq!(has_begun("behind"), place != HookPlace::Begin);
        let joins = usize::from(place != HookPlace::Begin);
        assert_eq!((played.count("join"), played.count("leave")), (joins, joins), "{place}");
    }
}

// T-4.
#[test]
fn checkpoints_are_saved_at_the_recorded_steps() {
    for (every, last_step, saved) in [
        (3, 10, &[0, 3, 6, 9, 10][..]),
        (3, 9, &[0, 3, 6, 9]),
        (3, 20, &[0, 3, 6, 9, 12, 15, 18, 20]),
        (100, 2, &[0, 2]),
        (1, 2, &[0, 1, 2]),
    ] {
        let played = saving(every, last_step).play(Vec::new());
        assert_eq!(played.saved(), saved, "every {every} to {last_step}");
    }
    let mut script = saving(3, 10);
    script.settings.is_chief = false;
    assert!(script.play(Vec::new()).saved().is_empty(), "only the chief saves");
}

#[test]
fn a_failed_save_is_repeated_only_if_that_can_help() {
    let mut script = saving(2, 5);
    script.faults = vec![("save", 2, busy()), ("save", 4, busy())];
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!(played.saved(), [0, 2, 4, 5, 5], "the final one is tried again");
    assert_eq!((played.count("a.save_failed"), played.count("a.saved")), (2, 3));
    assert_eq!(played.ended.unwrap().checkpoint.unwrap().step, 5);

    // Without a directory no save can succeed. A full disk or a lost shard may be back for the
    // next one, also if it was the first save that failed.
    let detail = || Text::clipped("what is wrong");
    let no_place = refused(Refusal::Checkpoint { detail: detail() });
    let storage = refused(Refusal::Storage { detail: detail() });
    let killed = refused(Refusal::Unavailable { detail: detail() });
    for (call, error, ends) in [
        (1, &no_place, true),
        (2, &no_place, true),
        (1, &storage, false),
        (2, &storage, false),
        (1, &killed, false),
        (1, &refused(Refusal::NotInitialized {}), false),
    ] {
        let mut script = saving(2, 5);
        script.faults = vec![("save", call, error.clone())];
        match (script.play(Vec::new()).ended, ends) {
            (Ok(ended), false) => assert_eq!(ended.checkpoint.unwrap().step, 5),
            (Err(TrainingError::Save { source }), true) => assert_eq!(source, *error),
            (ended, _) => panic!("{call} {error}: {ended:?}"),
        }
    }

    // A server is lost while it saves the final checkpoint.
    let mut script = saving(9, 2);
    script.faults = vec![("save", 2, lost())];
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!((played.saved(), played.count("join")), (vec![0, 2, 2], 2));
    assert_eq!((played.count("a.end"), played.ended.unwrap().step), (1, 2));
}

// T-7.
#[test]
fn a_training_gives_up_with_the_last_error_after_its_time() {
    let mut script = Script { last_step: 5, ..Script::default() };
    script.faults = vec![("pull", 3, lost())];
    let attempts = (0..100).map(|_| Err(timeout(None)));
    script.joins = std::iter::once(Ok((0, false))).chain(attempts).collect();
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    let error = played.ended.as_ref().unwrap_err();
    let TrainingError::GaveUp { attempts, waited, source } = error else { panic!("{error}") };
    assert_eq!((*source == timeout(None), *waited), (true, Duration::from_secs(60)));
    // Six pauses of at most 6.3 s together, then one of 2.5 s to 5 s each.
    assert!((17..=28).contains(attempts), "{attempts}");
    assert_eq!(played.count("join"), *attempts as usize + 1);
    assert_eq!((played.count("a.failed"), played.count("a.end")), (1, 0));
    assert_eq!(played.count("leave"), 0, "there is no worker");
    assert_eq!(error.worker_error(), Some(&timeout(None)));

    // Progress between two failures begins a new window.
    let mut script = Script { last_step: 50, ..Script::default() };
    script.settings.recover_for = Duration::from_secs(1);
    script.faults = (1..20).map(|step| ("pull", step * 2, lost())).collect();
    assert_eq!(script.play(Vec::new()).ended.unwrap().step, 50);

    let mut script = Script { last_step: 5, ..Script::default() };
    script.settings.recover_for = Duration::ZERO;
    script.faults = vec![("token", 2, lost())];
    let error = script.play(Vec::new()).ended.unwrap_err();
    assert!(matches!(error, TrainingError::GaveUp { attempts: 0, .. }), "{error}");
}

/// Joins a chief that has asked for a checkpoint, and returns its lifecycle.
fn with_save_under_way(settings: LifecycleSettings) -> Lifecycle {
    let mut lifecycle = Lifecycle::new(settings, Vec::new());
    lifecycle.joined(Duration::ZERO, &params_for(variables(), 0), None).unwrap();
    assert_eq!(lifecycle.next_action(Duration::ZERO), NextAction::Save);
    lifecycle.save_asked(Duration::ZERO);
    lifecycle
}

/// A server that never returns would hold the leave for its timeout, and the save for minutes.
#[test]
fn a_training_that_gives_up_waits_no_longer_for_its_servers() {
    let settings = saving(9, 9).settings;
    let ends = |mut lifecycle: Lifecycle| {
        let begin = Duration::from_secs(5);
        lifecycle.token_taken(begin, Err(timeout(None))).unwrap();
        let end = begin + settings.recover_for;
        let error = lifecycle.token_taken(end, Err(timeout(None))).unwrap_err();
        assert!(matches!(error, TrainingError::GaveUp { .. }), "{error}");
        assert_eq!(lifecycle.deadline(end), Some(end + Duration::from_secs(1)));
        lifecycle.next_action(end)
    };
    assert_eq!(ends(with_save_under_way(settings)), NextAction::Leave);
    // The program wants a checkpoint after any error, and the other servers may save it.
    let wanted = LifecycleSettings { final_checkpoint_on_error: true, ..settings };
    assert_eq!(ends(with_save_under_way(wanted)), NextAction::AwaitSave);
}

#[test]
fn an_error_of_the_caller_is_a_reason_for_haste_only_if_the_servers_have_failed() {
    let settings = saving(9, 9).settings;
    let now = Duration::from_secs(5);
    for (has_lost, expected, deadline) in [
        (false, NextAction::AwaitSave, None),
        (true, NextAction::Leave, Some(now + Duration::from_secs(1))),
    ] {
        let mut lifecycle = with_save_under_way(settings);
        if has_lost {
            lifecycle.token_taken(now, Err(timeout(None))).unwrap();
        }
        lifecycle.fail(TrainingError::Dropped);
        assert_eq!((lifecycle.next_action(now), lifecycle.deadline(now)), (expected, deadline));
    }
}

#[test]
fn a_worker_whose_run_was_ended_while_it_was_away_joins_again() {
    let ended = Refusal::UnknownEpoch { epoch: 3.into(), newest: 0.into() };
    for place in ["token", "pull", "push"] {
        let mut script = Script { last_step: 5, ..Script::default() };
        script.faults = vec![(place, 2, refused(ended.clone()))];
        let hooks = vec![Recorder::boxed("a", &script.log)];
        let played = script.play(hooks);
        assert_eq!((played.count("join"), played.count("a.failed")), (2, 0), "{place}");
        assert_eq!(played.ended.unwrap().step, 5, "{place}");
    }
}

#[test]
fn a_first_join_follows_its_own_deadline() {
    for (is_chief, fault, joins) in [
        // The session has waited for the chief or the servers, and names them.
        (true, timeout(None), 1),
        (false, timeout(None), 1),
        (false, refused(Refusal::Deadline { waited_ms: 9, awaited: Text::clipped("chief") }), 1),
        // The chief has found no checkpoint.
        (true, Error::NoCheckpoint { shard: SHARD }, 1),
        // A server was lost while the chief joined.
        (true, lost(), 2),
        (false, lost(), 2),
        (true, Error::Fenced, 1),
        (true, refused(Refusal::Checkpoint { detail: Text::clipped("another shape") }), 1),
        (true, refused(too_large()), 1),
        (true, refused(Refusal::Stopping {}), 2),
    ] {
        let mut script = Script { last_step: 1, ..Script::default() };
        script.settings.is_chief = is_chief;
        script.settings.connect_timeout = Duration::ZERO;
        script.joins = [Err(fault.clone())].into();
        let played = script.play(Vec::new());
        assert_eq!(played.count("join"), joins, "{is_chief} {fault}");
        match played.ended {
            Err(error) => assert_eq!((error.worker_error(), joins), (Some(&fault), 1)),
            Ok(ended) => assert_eq!((ended.step, joins), (1, 2)),
        }
    }
}

/// A server that is killed during the first join answers within the deadline of the join, if not
/// within that of one request.
#[test]
fn the_first_join_is_tried_again_until_its_deadline() {
    let mut script = Script { last_step: 1, ..Script::default() };
    script.joins = [Err(timeout(None)), Err(timeout(None))].into();
    let played = script.play(Vec::new());
    assert_eq!((played.count("join"), played.ended.unwrap().step), (3, 1));

    let mut script = Script { last_step: 1, ..Script::default() };
    script.joins = (0..100).map(|_| Err(timeout(None))).collect();
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    let error = played.ended.as_ref().unwrap_err();
    assert_eq!(error.worker_error(), Some(&timeout(None)));
    let limit = Duration::from_secs(30);
    assert!(played.now <= limit + Duration::from_secs(5) && played.count("a.retrying") > 5);
}

/// Waiting in silence for minutes is what a program cannot tell from work.
#[test]
fn hooks_hear_of_every_retry_with_its_cause() {
    let mut script = Script { last_step: 4, ..saving(9, 4) };
    script.faults = vec![
        ("token", 2, busy()),
        ("pull", 2, lost()),
        ("push", 3, timeout(Some(2))),
        ("save", 3, busy()),
    ];
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!(played.count("a.retrying"), 4);
    for cause in [busy(), lost(), timeout(Some(2))] {
        assert!(played.count(&format!("a.hears of {cause}")) > 0, "{cause}: {:?}", played.events);
    }
    assert_eq!(played.ended.unwrap().step, 4);
}

/// A model that has broken down gives nothing but NaN, and its batches are granted again and again.
#[test]
fn too_many_nan_in_a_row_end_the_training() {
    // Unlike NaN it equals itself.
    let nan = || Error::NonFinite { variable: "w".to_owned(), element: 0, value: f64::INFINITY };
    // Three are allowed. A gradient that counts begins another row.
    for (bad, ends) in
        [(vec![1, 2, 3], false), (vec![1, 2, 4, 5, 6], false), (vec![2, 3, 4, 5], true)]
    {
        let mut script = Script { last_step: 4, ..Script::default() };
        script.settings.non_finite_max = 3;
        script.faults = bad.iter().map(|&call| ("push", call, nan())).collect();
        let hooks = vec![Recorder::boxed("a", &script.log)];
        let played = script.play(hooks);
        match played.ended {
            Ok(ref ended) => assert_eq!((ended.step, ends), (4, false), "{bad:?}"),
            Err(TrainingError::NonFinite { in_a_row, ref source }) => {
                assert_eq!((in_a_row, source, ends), (4, &nan(), true), "{bad:?}");
                assert_eq!((played.count("a.after_step"), played.count("a.failed")), (5, 1));
            }
            Err(ref error) => panic!("{error}"),
        }
    }
}

// T-3.
#[test]
fn a_push_that_timed_out_is_waited_for() {
    let mut script = Script { last_step: 3, ..Script::default() };
    // The third call is a wait for the push of the second.
    script.faults = vec![("push", 2, timeout(Some(2))), ("push", 3, timeout(Some(2)))];
    let played = script.play(Vec::new());
    assert_eq!((played.count("push"), played.count("resume")), (3, 2));
    assert_eq!(played.ended.unwrap().step, 3, "it counts once");

    let mut script = Script { last_step: 3, ..Script::default() };
    script.faults = (1..200).map(|call| ("push", call, timeout(Some(1)))).collect();
    let error = script.play(Vec::new()).ended.unwrap_err();
    assert!(matches!(error, TrainingError::GaveUp { .. }), "{error}");
}

#[test]
fn a_refused_gradient_is_skipped() {
    let nan = Error::NonFinite { variable: "w".to_owned(), element: 0, value: f64::INFINITY };
    let mut script = Script { last_step: 3, ..Script::default() };
    script.faults = vec![("push", 2, nan)];
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!((played.count("push"), played.count("a.after_step")), (4, 4));
    assert_eq!((played.count("join"), played.ended.unwrap().step), (1, 3));
}

#[test]
fn a_fault_of_the_program_ends_the_training_at_once() {
    for place in ["token", "pull", "push"] {
        let mut script = Script { last_step: 3, ..Script::default() };
        script.faults = vec![(place, 2, Error::Fenced)];
        let hooks = vec![Recorder::boxed("a", &script.log)];
        let played = script.play(hooks);
        let error = played.ended.as_ref().unwrap_err();
        assert_eq!(error.worker_error(), Some(&Error::Fenced));
        assert_eq!((played.count("join"), played.count("a.failed")), (1, 1));
    }
}

// T-2, T-8.
#[test]
fn an_interrupt_ends_steps_and_waits() {
    let at = Duration::from_secs(3);
    let mut script = saving(100, 50);
    script.interrupt_at = Some(at);
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    let ended = played.ended.as_ref().unwrap();
    assert_eq!((ended.step, &ended.reason), (3, &StopReason::Interrupted));
    assert_eq!((played.saved(), played.count("a.end")), (vec![0, 3], 1));

    // While a push is under way: the gradient may count or not, and the worker leaves.
    let mut script = Script { interrupt_at: Some(at), ..Script::default() };
    script.faults = vec![("push", 3, Error::Interrupted { doing: "push" })];
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    let ended = played.ended.as_ref().unwrap();
    assert_eq!((ended.step, &ended.reason), (2, &StopReason::Interrupted));
    assert_eq!((played.count("push"), played.count("leave")), (3, 1));
    assert_eq!((played.count("a.end"), played.count("a.failed")), (1, 0));

    // Between two attempts to join: there is no server to save or leave.
    let mut script = saving(100, 50);
    script.interrupt_at = Some(at);
    script.faults = vec![("token", 2, lost())];
    script.joins = [Ok((0, false))].into();
    script.joins.extend((0..100).map(|_| Err(timeout(None))));
    let hooks = vec![Recorder::boxed("a", &script.log)];
    let played = script.play(hooks);
    assert_eq!(played.ended.as_ref().unwrap().reason, StopReason::Interrupted);
    assert_eq!((played.now, played.saved(), played.count("leave")), (at, vec![0], 0));
    assert_eq!((played.count("a.end"), played.count("a.failed")), (1, 0));
}

/// A synchronous server that has not applied the step of the last gradient when the training ends.
// T-4.
#[test]
fn the_final_checkpoint_waits_for_the_accepted_step_and_is_asked_for_once() {
    let mut lifecycle = Lifecycle::new(saving(1, 9).settings, Vec::new());
    let params = params_for(variables(), 4);
    let mut scalars = Scalars::default();
    let now = Duration::ZERO;
    let saved = |step| Ok(saved_checkpoint("", step));
    lifecycle.joined(now, &params, None).unwrap();
    assert_eq!(lifecycle.next_action(now), NextAction::Save);
    lifecycle.save_asked(now);
    lifecycle.saved(now, saved(4)).unwrap();
    assert!(lifecycle.token_taken(now, Ok(Ok(4))).unwrap());
    assert!(lifecycle.pulled(now, Ok(Pulled::Pulled { step: 4 })).unwrap());
    let accepted = GradientOutcome::Pushed(Push::Accepted { step: 5 });
    let timing = StepTiming::default();
    lifecycle.after_step(now, &accepted, &params, &mut scalars, timing).unwrap();
    // Step 4 is saved already, and step 5 not known to be applied.
    assert_eq!(lifecycle.next_action(now), NextAction::Token);
    lifecycle.stop(StopReason::Closed);
    assert_eq!(lifecycle.next_action(now), NextAction::Refresh { at_least: 5 });
    lifecycle.refreshed(now, Ok(5)).unwrap();
    assert_eq!(lifecycle.next_action(now), NextAction::Save);
    lifecycle.save_asked(now);
    assert_eq!(lifecycle.next_action(now), NextAction::AwaitSave);
    // A hostile or confused server answers with an older step.
    lifecycle.saved(now, saved(4)).unwrap();
    assert_eq!(lifecycle.next_action(now), NextAction::End);
}

/// A hook that ends the training at a failure of this number.
struct StopAtAttempt(u32);

impl Hook for StopAtAttempt {
    fn retrying(&mut self, retry: &RetryReport) -> Result<Flow, HookError> {
        let stops = retry.attempts >= self.0;
        Ok(if stops { Flow::Stop("enough".to_owned()) } else { Flow::Continue })
    }
}

/// A hook that ends the training once a gradient is lost.
struct StopAtLoss;

impl Hook for StopAtLoss {
    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let is_lost = matches!(step.outcome, GradientOutcome::Lost(_));
        Ok(if is_lost { Flow::Stop("a loss".to_owned()) } else { Flow::Continue })
    }
}

/// A training that has ended for its hook must not fail after the window for want of a server.
#[test]
fn a_hook_ends_a_training_that_cannot_join_again() {
    for (place, attempts, last_step, steps) in
        [("token", 1, 9, 1), ("push", 1, 9, 2), ("pull", 4, 9, 1), ("save", 3, 2, 2)]
    {
        let mut script = saving(100, last_step);
        script.faults = vec![(place, 2, lost())];
        let refused = (0..100).map(|_| Err(timeout(None)));
        script.joins = std::iter::once(Ok((0, false))).chain(refused).collect();
        let recorder = Recorder::boxed("a", &script.log);
        let played = script.play(vec![recorder, Box::new(StopAtAttempt(attempts))]);
        let ended = played.ended.as_ref().unwrap();
        let by_hook =
            StopReason::Hook { hook: "StopAtAttempt".to_owned(), reason: "enough".to_owned() };
        let reason = if place == "save" { StopReason::LastStep } else { by_hook };
        assert_eq!((&ended.reason, ended.is_final), (&reason, false), "{place}");
        // The first join, and one attempt after each failure but the last.
        assert_eq!(played.count("join"), attempts as usize, "{place}: {:?}", played.events);
        assert_eq!((played.count("a.end"), played.count("leave")), (1, 0), "{place}");
        assert_eq!(played.count("a.after_step"), steps, "{place}: the calls that are due");
    }
}

// T-7.
#[test]
fn the_attempt_after_a_stop_has_its_pause() {
    // Between two steps the calls of the end are due, and their first attempt comes after a pause.
    let mut script = saving(100, 9);
    script.faults = vec![("token", 2, busy())];
    let played = script.play(vec![Box::new(StopAtAttempt(1))]);
    assert_eq!(played.saved(), [0, 1]);
    assert!(played.now >= Duration::from_millis(1050), "{:?}", played.now);

    // A hook stops at the step whose gradient was lost. Its final checkpoint needs the join.
    let mut script = saving(100, 9);
    script.faults = vec![("push", 2, lost())];
    let played = script.play(vec![Box::new(StopAtLoss)]);
    assert_eq!((played.saved(), played.count("join")), (vec![0, 1], 2));
    assert!(played.now >= Duration::from_millis(2050), "{:?}", played.now);
}

#[test]
fn a_gate_delays_a_step_or_ends_the_training() {
    let script = Script { last_step: 3, ..Script::default() };
    let stop = Gate(|step| match step {
        0 | 1 => StepGate::Begin,
        _ => StepGate::Stop("enough".to_owned()),
    });
    let hooks = vec![Recorder::boxed("a", &script.log), Box::new(stop)];
    let played = script.play(hooks);
    let ended = played.ended.as_ref().unwrap();
    let reason = StopReason::Hook { hook: "Gate".to_owned(), reason: "enough".to_owned() };
    assert_eq!((ended.step, &ended.reason), (2, &reason));
    assert_eq!((played.count("a.before_step"), played.count("a.after_step")), (3, 2));

    // Each wait asks for another token; the interrupt ends the last.
    let mut script = Script { last_step: 3, ..Script::default() };
    script.interrupt_at = Some(Duration::from_millis(1300));
    let played = script.play(vec![Box::new(Gate(|_| StepGate::Wait(Duration::from_millis(500))))]);
    assert_eq!((played.count("token"), played.count("push")), (3, 0));
    assert_eq!(played.ended.unwrap().reason, StopReason::Interrupted);
}
