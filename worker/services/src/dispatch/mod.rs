//! [`Dispatch`]: the scheduler of calls on workers, with retries and errors.

mod call_queue;
mod ended_calls;
mod io;
mod scheduled_call;
#[cfg(test)]
mod tests;
mod worker_state;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use pushpull_common::effect_window::EffectWindow;

use self::call_queue::CallQueue;
use self::ended_calls::EndedCalls;
pub(crate) use self::io::{
    Attempt, AttemptEnd, CallEnding, DispatchInput, DispatchOutput, MakingEnd, ResourceId, WorkerId,
};
use self::scheduled_call::{CallStatus, ScheduledCall};
use self::worker_state::{ResourceStatus, WorkerState};
use crate::planted::{PlantedServiceBugs, ServiceBug};

/// The settings of a dispatch.
#[derive(Clone, Debug)]
pub(crate) struct DispatchConfig {
    /// The number of workers, present or absent.
    pub(crate) workers: u32,
    /// The most scheduled calls that have not ended.
    pub(crate) queue_max: usize,
    /// The most calls that one worker runs at once.
    pub(crate) calls_per_worker: usize,
    /// The greatest distance between the number of a call under way and the first that has not
    /// ended.
    pub(crate) window: u64,
    /// The longest time for which a call is tried again after its first failure. Lost workers do
    /// not count.
    pub(crate) retry_for: Duration,
    /// The number of times that a call is tried again after a timeout.
    pub(crate) timeouts_max: u32,
    /// The planted bug, if any.
    pub(crate) planted: PlantedServiceBugs,
}

/// The back-off of a call or a resource that is tried again: the first and the longest pause.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The decisions of a coordinator about its calls.
///
/// **In**: calls in the order of their numbers, workers that come and go, ends of attempts, and the
/// time. **Out**: attempts to begin or to cancel, calls that have ended, an error for the program.
/// **Time**: a call that may be tried again waits for a pause.
///
/// A lost worker gives its calls back: others run them, unless they are pinned to it. After a final
/// error no call begins. At the program's next check the queued calls are cancelled. Once no call
/// is under way, the program gets the error, once.
///
/// A call that needs a resource fails once every worker that may run it cannot have the resource.
/// An absent worker may have it once it comes.
///
/// **Never**: two attempts of a call are under way at once, as far as the dispatch knows. No call
/// ends twice. [`Dispatch::settled`] covers no call that may still have an effect.
#[derive(Debug)]
pub(crate) struct Dispatch<E> {
    config: DispatchConfig,
    calls: BTreeMap<u64, ScheduledCall<E>>,
    /// The calls that any worker may run.
    queue: CallQueue,
    /// The ends of the pauses of calls, in their order, with the call numbers.
    pauses: BTreeSet<(Instant, u64)>,
    workers: BTreeMap<WorkerId, WorkerState>,
    resources: BTreeSet<ResourceId>,
    /// The last error of each resource that a worker could not make.
    resource_errors: BTreeMap<ResourceId, E>,
    ended: EndedCalls,
    next_number: u64,
    next_attempt: u64,
    /// The first error that is final, until the program gets it.
    error: Option<E>,
    /// Whether the program has checked since the error, so that the queued calls were cancelled.
    looked: bool,
    outputs: VecDeque<DispatchOutput>,
}

impl<E: Clone> Dispatch<E> {
    /// Creates a dispatch. The calls that have settled in the window count as ended.
    pub(crate) fn new(config: DispatchConfig, window: EffectWindow) -> Dispatch<E> {
        let workers = (0..config.workers).map(|index| (WorkerId(index), WorkerState::default()));
        Dispatch {
            workers: workers.collect(),
            config,
            calls: BTreeMap::new(),
            queue: CallQueue::default(),
            pauses: BTreeSet::new(),
            resources: BTreeSet::new(),
            resource_errors: BTreeMap::new(),
            ended: EndedCalls::new(window),
            next_number: 1,
            next_attempt: 1,
            error: None,
            looked: false,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next action.
    pub(crate) fn poll_output(&mut self) -> Option<DispatchOutput> {
        self.outputs.pop_front()
    }

    /// Returns when a [`DispatchInput::Tick`] is due; `None` while nothing depends on the time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let resources = self.workers.values().flat_map(|state| state.resources.values());
        let making = resources.filter_map(|status| match status {
            ResourceStatus::BackingOff { until, .. } => Some(*until),
            _ => None,
        });
        self.pauses.first().map(|&(until, _)| until).into_iter().chain(making).min()
    }

    /// Returns the number up to which all calls have ended, so that none of them can have a further
    /// effect.
    pub(crate) fn settled(&self) -> u64 {
        self.ended.settled()
    }

    /// Returns the number of the program's next call. Numbers ascend from 1, so a restarted program
    /// that schedules the same calls in the same order gives them the same numbers.
    pub(crate) fn number_call(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Gives the next call this number, if it is above the numbers of earlier calls.
    pub(crate) fn skip_to(&mut self, number: u64) {
        self.next_number = self.next_number.max(number);
    }

    /// Returns whether a call has ended, also before the dispatch began.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.ended.has(number)
    }

    /// Returns whether another call may be scheduled.
    pub(crate) fn has_room(&self) -> bool {
        self.calls.len() < self.config.queue_max && self.error.is_none()
    }

    /// Returns whether nothing is scheduled or under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Takes the error that the program is to get, once no call is under way.
    pub(crate) fn take_error(&mut self) -> Option<E> {
        let quiet = self.looked && self.calls.is_empty();
        match quiet {
            true => {
                self.looked = false;
                self.error.take()
            }
            false => None,
        }
    }

    /// Returns whether one of these calls needs the program's check to begin, because of an error.
    pub(crate) fn await_look<'a>(&self, numbers: impl IntoIterator<Item = &'a u64>) -> bool {
        let waits = |number| {
            let call = self.calls.get(number);
            call.is_some_and(|call| !matches!(call.status, CallStatus::Running { .. }))
        };
        self.error.is_some() && numbers.into_iter().any(waits)
    }

    /// Returns the last error of a resource that could not be made.
    pub(crate) fn resource_error(&self, resource: ResourceId) -> Option<&E> {
        self.resource_errors.get(&resource)
    }

    /// Returns whether a worker is present, as far as the dispatch knows.
    pub(crate) fn is_up(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|state| state.is_up)
    }

    /// Handles an input and queues the outputs that follow from it.
    pub(crate) fn handle(&mut self, now: Instant, input: DispatchInput<E>) {
        match input {
            DispatchInput::Schedule { number, pinned, resources } => {
                self.schedule(number, pinned, resources);
            }
            DispatchInput::Look => self.look(),
            DispatchInput::WorkerUp { worker } => self.worker_up(worker),
            DispatchInput::WorkerLost { worker } => self.worker_lost(worker),
            DispatchInput::Resource { resource } => {
                self.resources.insert(resource);
            }
            DispatchInput::MakingEnded { worker, resource, end } => {
                self.making_ended(now, worker, resource, end);
            }
            DispatchInput::AttemptEnded { attempt, end } => self.attempt_ended(now, attempt, end),
            DispatchInput::Tick => {}
        }
        self.end_pauses(now);
        self.make_resources(now);
        self.fail_unrunnable();
        self.start_calls();
    }

    fn schedule(&mut self, number: u64, pinned: Option<WorkerId>, resources: Vec<ResourceId>) {
        if self.ended.has(number) || self.calls.contains_key(&number) {
            return;
        }
        self.calls.insert(number, ScheduledCall::new(pinned, resources));
        self.enqueue(number);
    }

    /// Handles a check of the program: after an error every call that has not begun is cancelled.
    fn look(&mut self) {
        if self.error.is_none() {
            return;
        }
        self.looked = true;
        let waits = |call: &ScheduledCall<E>| !matches!(call.status, CallStatus::Running { .. });
        let waiting = self.calls.iter().filter(|(_, call)| waits(call));
        let waiting: Vec<u64> = waiting.map(|(&number, _)| number).collect();
        self.queue.clear();
        self.pauses.clear();
        for worker in self.workers.values_mut() {
            worker.pinned.clear();
        }
        for number in waiting {
            self.end(number, CallEnding::Cancelled);
        }
    }

    fn worker_up(&mut self, worker: WorkerId) {
        // A worker that comes up again without having been lost has restarted.
        self.worker_lost(worker);
        self.workers.entry(worker).or_default().is_up = true;
    }

    /// Handles the loss of a worker with its resources. Its calls return to the queue.
    fn worker_lost(&mut self, worker: WorkerId) {
        let Some(state) = self.workers.get_mut(&worker) else { return };
        state.is_up = false;
        state.resources.clear();
        let running = std::mem::take(&mut state.running);
        for (number, attempt) in running {
            self.outputs.push_back(DispatchOutput::Cancel { attempt });
            self.requeue(number);
        }
    }

    /// Puts a call that has begun back into its queue.
    fn requeue(&mut self, number: u64) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        call.status = CallStatus::Queued;
        if self.config.planted.has(ServiceBug::RetryPinnedElsewhere) {
            call.pinned = None;
        }
        self.enqueue(number);
    }

    /// Puts a call into its queue. After an error that the program has checked, the call is
    /// cancelled instead. Otherwise it might never end, because the program may not check again
    /// before.
    fn enqueue(&mut self, number: u64) {
        if self.is_cancelling() {
            return self.end(number, CallEnding::Cancelled);
        }
        let Some(call) = self.calls.get(&number) else { return };
        let queue = match call.pinned {
            None => &mut self.queue,
            Some(worker) => &mut self.workers.entry(worker).or_default().pinned,
        };
        queue.insert(number, &call.resources);
    }

    fn attempt_ended(&mut self, now: Instant, attempt: Attempt, end: AttemptEnd<E>) {
        let Attempt { number, worker, .. } = attempt;
        // An attempt that was given up means nothing any more.
        let is_current = self.workers.get_mut(&worker).is_some_and(|state| {
            let running = state.running.get(&number) == Some(&attempt);
            if running {
                state.running.remove(&number);
            }
            running
        });
        if !is_current {
            return;
        }
        match end {
            AttemptEnd::Done => self.end(number, CallEnding::Done),
            AttemptEnd::Lost => {
                self.requeue(number);
                self.worker_lost(worker);
            }
            AttemptEnd::TimedOut(error) => self.timed_out(now, number, error),
            AttemptEnd::Retry(error) => self.retry(now, number, error),
            AttemptEnd::Final(error) => self.fail(number, error),
        }
    }

    fn timed_out(&mut self, now: Instant, number: u64, error: E) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        if call.timeouts >= self.config.timeouts_max || self.error.is_some() {
            return self.fail(number, error);
        }
        call.timeouts += 1;
        self.pause(now, number, error);
    }

    fn retry(&mut self, now: Instant, number: u64, error: E) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        let since = *call.failing_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= self.config.retry_for || self.error.is_some() {
            return self.fail(number, error);
        }
        self.pause(now, number, error);
    }

    /// Begins the pause of a call before its next attempt.
    fn pause(&mut self, now: Instant, number: u64, error: E) {
        let Some(call) = self.calls.get_mut(&number) else { return };
        let pause = pause_after(call.failures);
        call.failures += 1;
        call.status = CallStatus::BackingOff { last: error };
        self.pauses.insert((now + pause, number));
    }

    /// Returns whether calls that are not under way are cancelled: there is an error, and the
    /// program has checked since.
    fn is_cancelling(&self) -> bool {
        self.looked && self.error.is_some()
    }

    /// Fails a call for good. The first such error is kept for the program.
    fn fail(&mut self, number: u64, error: E) {
        self.end(number, CallEnding::Failed);
        self.set_error(error);
    }

    fn set_error(&mut self, error: E) {
        if self.error.is_none() {
            self.error = Some(error);
            self.looked = false;
        }
    }

    fn end(&mut self, number: u64, ending: CallEnding) {
        if self.calls.remove(&number).is_some() {
            self.ended.end(number);
            self.outputs.push_back(DispatchOutput::Ended { number, ending });
        }
    }

    /// Puts the calls whose pauses have passed back into their queues.
    fn end_pauses(&mut self, now: Instant) {
        while let Some(&(until, number)) = self.pauses.first()
            && until <= now
        {
            self.pauses.pop_first();
            self.requeue(number);
        }
    }

    fn making_ended(
        &mut self,
        now: Instant,
        worker: WorkerId,
        resource: ResourceId,
        end: MakingEnd<E>,
    ) {
        let Some(state) = self.workers.get_mut(&worker) else { return };
        let failures = match state.resources.get(&resource) {
            Some(ResourceStatus::Making { failures }) => *failures,
            _ => 0,
        };
        let status = match end {
            MakingEnd::Made => ResourceStatus::Made,
            MakingEnd::Failed(error) => {
                self.resource_errors.insert(resource, error);
                ResourceStatus::Failed
            }
            MakingEnd::Retry => {
                let until = now + pause_after(failures);
                ResourceStatus::BackingOff { until, failures: failures + 1 }
            }
        };
        state.resources.insert(resource, status);
    }

    /// Begins to make the resources that workers lack.
    fn make_resources(&mut self, now: Instant) {
        for (&worker, state) in self.workers.iter_mut().filter(|(_, state)| state.is_up) {
            for &resource in &self.resources {
                let failures = match state.resources.get(&resource) {
                    None => 0,
                    Some(&ResourceStatus::BackingOff { until, failures }) if until <= now => {
                        failures
                    }
                    Some(_) => continue,
                };
                state.resources.insert(resource, ResourceStatus::Making { failures });
                self.outputs.push_back(DispatchOutput::Make { worker, resource });
            }
        }
    }

    /// Fails the queued calls that no worker can run.
    fn fail_unrunnable(&mut self) {
        // After an error what is queued is cancelled.
        if self.resource_errors.is_empty() || self.error.is_some() {
            return;
        }
        let workers = &self.workers;
        let lacks_everywhere = |needed: &[ResourceId]| {
            let failed = |state: &WorkerState| worker_state::failed(&state.resources, needed);
            let failed: Option<Vec<ResourceId>> = workers.values().map(failed).collect();
            failed?.pop()
        };
        let mut unrunnable = self.queue.take_unrunnable(lacks_everywhere);
        for WorkerState { pinned, resources, .. } in self.workers.values_mut() {
            let lacks = |needed: &[ResourceId]| worker_state::failed(resources, needed);
            unrunnable.append(&mut pinned.take_unrunnable(lacks));
        }
        unrunnable.sort_unstable();
        for (number, resource) in unrunnable {
            self.end(number, CallEnding::WithoutResource { resource });
            if let Some(error) = self.resource_errors.get(&resource).cloned() {
                self.set_error(error);
            }
        }
    }

    /// Begins queued calls on workers with a free place.
    fn start_calls(&mut self) {
        if self.error.is_some() {
            return;
        }
        let last = self.ended.settled().saturating_add(self.config.window);
        loop {
            // The worker with the fewest calls is next, so that all have some.
            let free = |state: &WorkerState| {
                state.is_up && state.running.len() < self.config.calls_per_worker
            };
            let mut free: Vec<(usize, WorkerId)> = self
                .workers
                .iter()
                .filter(|(_, state)| free(state))
                .map(|(&worker, state)| (state.running.len(), worker))
                .collect();
            free.sort_unstable();
            let begun = free.into_iter().any(|(_, worker)| self.start_next(worker, last));
            if !begun {
                return;
            }
        }
    }

    /// Begins the next call that a worker may run. Returns whether there was one.
    fn start_next(&mut self, worker: WorkerId, last: u64) -> bool {
        let Some(state) = self.workers.get_mut(&worker) else { return false };
        let WorkerState { pinned, resources: made, .. } = state;
        let has = |resources: &[ResourceId]| worker_state::has(made, resources);
        let taken = pinned.take(last, has).or_else(|| self.queue.take(last, has));
        let Some(number) = taken else { return false };
        let attempt = Attempt { number, worker, attempt: self.next_attempt };
        self.next_attempt += 1;
        state.running.insert(number, attempt);
        if let Some(call) = self.calls.get_mut(&number) {
            call.status = CallStatus::Running { worker };
        }
        let settled = self.ended.settled();
        self.outputs.push_back(DispatchOutput::Start { attempt, settled });
        true
    }

    /// Checks the invariants of the dispatch.
    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        let mut running: Vec<u64> =
            self.workers.values().flat_map(|state| state.running.keys().copied()).collect();
        running.sort_unstable();
        for pair in running.windows(2) {
            assert_ne!(pair[0], pair[1], "call {} runs twice", pair[0]);
        }
        for (number, call) in &self.calls {
            assert!(!self.ended.has(*number), "call {number} has ended and is scheduled");
            let queued = self.queue.contains(*number)
                || self.workers.values().any(|state| state.pinned.contains(*number));
            let pauses = self.pauses.iter().filter(|(_, paused)| paused == number).count();
            let rests = matches!(call.status, CallStatus::BackingOff { .. });
            assert_eq!(pauses, usize::from(rests), "the pause of call {number}");
            let runs = running.contains(number);
            let consistent = match &call.status {
                CallStatus::Queued => queued && !runs,
                CallStatus::Running { worker } => {
                    !queued && self.workers[worker].running.contains_key(number)
                }
                CallStatus::BackingOff { .. } => !queued && !runs,
            };
            assert!(consistent, "call {number} is queued: {queued}, runs: {runs}");
            assert!(runs || !self.is_cancelling(), "call {number} waits and will never begin");
        }
        self.ended.check_invariants();
    }
}

/// Returns the pause after a failure with this many failures before it.
fn pause_after(failures: u32) -> Duration {
    BACK_OFF.0.saturating_mul(1 << failures.min(10)).min(BACK_OFF.1)
}
