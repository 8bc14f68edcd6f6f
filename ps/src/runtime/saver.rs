//! The saver thread of the step owner's task: it schedules periodic saves, runs one save and one
//! search for the newest checkpoint at a time, and answers the requests for both. The orders of the
//! shard wait in a queue, so the shard never waits for the saver.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pushpull_checkpoint::{AbandonFlag, CheckpointFault, CheckpointName};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};
use pushpull_common::protocol::wire::Text;
use pushpull_store::arena::SaveNote;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::publisher::{CheckpointSearch, FailedSave, PublishedSave, Publisher};
use crate::config::OnSaveFailure;
use crate::event::{Event, EventSink};
use crate::metrics::{Counters, SaveRecord};
use crate::shard::file_work::saver_order::{PERIODIC_SAVE, SaveRequester, SaverEvent, SaverOrder};

/// A save requested in this process: the user's bytes, and the channel for the result.
pub(super) type SaveWaiter = (Vec<u8>, oneshot::Sender<Result<CheckpointId, CheckpointFault>>);

/// The configuration and channels of the saver thread.
pub(super) struct Saver {
    pub(super) publisher: Arc<Publisher>,
    pub(super) every: Option<Duration>,
    pub(super) on_failure: OnSaveFailure,
    pub(super) counters: Arc<Counters>,
    /// The outcomes of the saves, for the server's handle.
    pub(super) record: watch::Sender<SaveRecord>,
    /// The last failure, for readers of the state directory; `None` without one.
    pub(super) note: Option<SaveNote>,
    pub(super) events: EventSink,
    pub(super) orders: mpsc::Receiver<SaverOrder>,
    pub(super) save_waiters: mpsc::Receiver<SaveWaiter>,
    pub(super) news: mpsc::Sender<SaverEvent>,
    /// Abandons the publisher's file I/O.
    pub(super) abandon_flag: AbandonFlag,
    pub(super) stop: CancellationToken,
}

/// The orders of a shard for the saver, in order, until the saver's channel takes them. Without a
/// saver they are dropped.
#[derive(Debug)]
pub(super) struct SaverOrders {
    saver: Option<mpsc::Sender<SaverOrder>>,
    /// Orders that did not fit into the channel yet.
    queue: RefCell<VecDeque<SaverOrder>>,
}

impl SaverOrders {
    /// Creates an empty queue for this saver.
    pub(super) fn new(saver: Option<mpsc::Sender<SaverOrder>>) -> SaverOrders {
        SaverOrders { saver, queue: RefCell::default() }
    }

    /// Queues an order and sends what the channel takes.
    pub(super) fn add(&self, order: SaverOrder) {
        self.queue.borrow_mut().push_back(order);
        self.send();
    }

    /// Sends what the channel takes.
    pub(super) fn send(&self) {
        let mut queue = self.queue.borrow_mut();
        while let (Some(saver), Some(order)) = (&self.saver, queue.pop_front()) {
            if let Err(TrySendError::Full(order)) = saver.try_send(order) {
                return queue.push_front(order);
            }
        }
        queue.clear();
    }
}

/// The most requests that wait for a search; one search answers all of them.
const FINDERS_MAX: usize = 1024;

/// A period that does not pass. Beyond it the clock would overflow.
const NEVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Runs the saver on the calling thread until the server stops.
pub(super) fn run(saver: Saver) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stop = saver.stop.clone();
    let abandon_flag = saver.abandon_flag.clone();
    // Dropping the runtime waits for file I/O, which the flag ends after the current piece.
    let stopping = || abandon_flag.abandon("the server stops");
    runtime.block_on(async {
        tokio::select! {
            () = async { stop.cancelled().await; stopping() } => {}
            () = SaverService::new(saver).serve() => {}
        }
    });
    stopping();
    Ok(())
}

/// The saver's state: the save and the search under way, and the requests that wait for them.
///
/// Invariants:
/// - At most one save is under way, because the shard orders the next after the result of this one.
/// - At most one search is under way.
/// - A search answers only requests that arrived before a checkpoint was published during it.
struct SaverService {
    saver: Saver,
    /// The save requests of this process, by ticket.
    tickets: BTreeMap<u64, oneshot::Sender<Result<CheckpointId, CheckpointFault>>>,
    next_ticket: u64,
    saving: Option<(SaveRequester, SaverTask<Result<PublishedSave, FailedSave>>)>,
    search: Option<RunningSearch>,
    /// Requests that arrived after the search under way became outdated.
    finders: Vec<Finder>,
    /// The restore epoch and the step of the last successful save.
    saved: Option<(RestoreEpoch, GlobalStep)>,
    /// The name of the last save that began and failed.
    failed: Option<CheckpointName>,
    /// Whether the server stops, because a save has failed and that is its setting.
    stops: bool,
}

type SaverTask<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A connection, and its request for the newest checkpoint.
type Finder = (u64, Envelope);

struct RunningSearch {
    task: SaverTask<CheckpointSearch>,
    finders: Vec<Finder>,
    /// Whether a checkpoint was published since the search began.
    outdated: bool,
}

impl SaverService {
    fn new(saver: Saver) -> SaverService {
        SaverService {
            saver,
            tickets: BTreeMap::new(),
            next_ticket: PERIODIC_SAVE + 1,
            saving: None,
            search: None,
            finders: Vec::new(),
            saved: None,
            failed: None,
            stops: false,
        }
    }

    async fn serve(mut self) {
        let mut due = self.saver.every.and_then(|every| {
            let first = Instant::now().checked_add(every).filter(|_| every < NEVER)?;
            let mut due = tokio::time::interval_at(first, every);
            due.set_missed_tick_behavior(MissedTickBehavior::Delay);
            Some(due)
        });
        loop {
            let event = tokio::select! {
                order = self.saver.orders.recv() => match order {
                    None => return,
                    Some(order) => self.order(order),
                },
                Some((user, done)) = self.saver.save_waiters.recv() => Some(self.request_save(user, done)),
                (requester, saved) = next_save(&mut self.saving) => Some(self.saved(requester, saved)),
                found = next_search(&mut self.search) => {
                    self.found(found).await;
                    None
                }
                () = tick(&mut due) => self.due(),
            };
            if let Some(event) = event {
                self.report(event).await;
            }
            if self.stops {
                // Its requester is answered before: the shard has the report.
                self.saver.stop.cancel();
            }
        }
    }

    async fn report(&mut self, event: SaverEvent) {
        // The channel is closed only while the server stops, and then nothing waits for the event.
        let _ = self.saver.news.send(event).await;
    }

    fn order(&mut self, order: SaverOrder) -> Option<SaverEvent> {
        match order {
            SaverOrder::Find { connection, request } => self.find((connection, request)),
            SaverOrder::Save { requester, user, catalogue, epoch, step } => {
                self.begin_save(requester, user, catalogue, (epoch, step))
            }
            SaverOrder::ReportSave { ticket, result } => {
                if ticket == PERIODIC_SAVE
                    && let Err(fault) = &result
                {
                    // The save did not begin, so nothing else counts the failure.
                    self.count_failure(&fault.to_string());
                }
                if let Some(done) = self.tickets.remove(&ticket) {
                    // The requester may have stopped waiting.
                    let _ = done.send(result);
                }
                None
            }
        }
    }

    fn request_save(
        &mut self,
        user: Vec<u8>,
        done: oneshot::Sender<Result<CheckpointId, CheckpointFault>>,
    ) -> SaverEvent {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket, done);
        SaverEvent::SaveRequested { ticket, user }
    }

    /// Requests a periodic save, unless one is under way or nothing has been trained. A skipped
    /// period is not made up for.
    fn due(&self) -> Option<SaverEvent> {
        let trained = self.saver.counters.global_step.read() > 0;
        let due = self.saving.is_none() && trained;
        due.then(|| SaverEvent::SaveRequested { ticket: PERIODIC_SAVE, user: Vec::new() })
    }

    /// Begins a save, or returns the answer that nothing is to be saved.
    fn begin_save(
        &mut self,
        requester: SaveRequester,
        user: Vec<u8>,
        catalogue: Arc<Catalogue>,
        of: (RestoreEpoch, GlobalStep),
    ) -> Option<SaverEvent> {
        // Nothing was trained since the last save. A requested save runs in any case: the user's
        // bytes are new, and an assignment does not advance the step.
        if requester.is_periodic() && self.saved == Some(of) {
            let result = Err(CheckpointFault::Unavailable("no checkpoint is due".to_owned()));
            return Some(SaverEvent::Saved { requester, result });
        }
        debug_assert!(self.saving.is_none(), "a save is ordered while another is under way");
        let publisher = self.saver.publisher.clone();
        let (epoch, step) = of;
        let save = publisher.save(user, catalogue, epoch, step, self.failed);
        self.saving = Some((requester, Box::pin(save)));
        None
    }

    fn saved(
        &mut self,
        requester: SaveRequester,
        result: Result<PublishedSave, FailedSave>,
    ) -> SaverEvent {
        self.saving = None;
        match &result {
            Err(FailedSave { fault, begun }) => {
                self.failed = begun.or(self.failed);
                self.count_failure(&fault.to_string());
            }
            Ok(PublishedSave { checkpoint, retained }) => {
                self.succeeded(checkpoint, retained);
                self.saved = Some((checkpoint.epoch, checkpoint.step));
                if let Some(search) = &mut self.search {
                    search.outdated = true;
                }
            }
        }
        let result = result.map(|published| published.checkpoint);
        SaverEvent::Saved { requester, result: result.map_err(|failed| failed.fault) }
    }

    /// Counts a failed save, emits its event and writes it to the note.
    fn count_failure(&mut self, cause: &str) {
        let mut in_a_row = 0;
        self.saver.record.send_modify(|record| in_a_row = record.failed(cause));
        self.saver.counters.saves_failed.add(1);
        self.saver.counters.saves_failed_in_a_row.set(in_a_row);
        let status = self.saver.record.borrow().status(std::time::Instant::now());
        let since_success = status.since_success;
        self.saver.events.emit(&Event::SaveFailed {
            cause: cause.to_owned(),
            in_a_row,
            since_success,
        });
        if let Some(note) = &self.saver.note {
            note.write(in_a_row, cause);
        }
        self.stops = self.saver.on_failure == OnSaveFailure::Stop;
    }

    fn succeeded(&mut self, checkpoint: &CheckpointId, retained: &Result<(), String>) {
        let Saver { record, counters, events, note, .. } = &self.saver;
        let mut failed = 0;
        let name = checkpoint.name.as_str();
        record.send_modify(|record| failed = record.saved(std::time::Instant::now(), name));
        counters.checkpoints_saved.add(1);
        counters.saves_failed_in_a_row.set(0);
        let saved = Event::CheckpointSaved { checkpoint: name.to_owned(), step: checkpoint.step.0 };
        events.emit(&saved);
        if failed > 0 {
            events.emit(&Event::SavesResumed { checkpoint: name.to_owned(), failed });
        }
        // Also removes a note of an earlier process.
        note.iter().for_each(SaveNote::remove);
        if let Err(cause) = retained {
            counters.retentions_failed.add(1);
            let checkpoint = name.to_owned();
            let cause = cause.clone();
            events.emit(&Event::RetentionFailed { checkpoint, cause });
        }
    }

    fn find(&mut self, finder: Finder) -> Option<SaverEvent> {
        let finders = match &mut self.search {
            Some(search) if !search.outdated => &mut search.finders,
            _ => &mut self.finders,
        };
        if finders.len() >= FINDERS_MAX {
            let (connection, request) = finder;
            let cause =
                format!("cannot search for checkpoints: {FINDERS_MAX} requests already wait");
            let result = Err(CheckpointFault::Unavailable(cause));
            let passed_over = Vec::new();
            let named = RestoreEpoch(0);
            return Some(SaverEvent::Found { connection, request, result, passed_over, named });
        }
        finders.push(finder);
        self.begin_find();
        None
    }

    fn begin_find(&mut self) {
        if self.search.is_none() && !self.finders.is_empty() {
            let task = Box::pin(self.saver.publisher.clone().find());
            let finders = std::mem::take(&mut self.finders);
            self.search = Some(RunningSearch { task, finders, outdated: false });
        }
    }

    async fn found(&mut self, search: CheckpointSearch) {
        let CheckpointSearch { newest: result, passed_over, named } = search;
        self.report_passed_over(&result, &passed_over);
        let Some(RunningSearch { mut finders, outdated, .. }) = self.search.take() else { return };
        if outdated && result.is_err() {
            // The search may have read a checkpoint that the newer one has superseded.
            self.finders.append(&mut finders);
        }
        self.begin_find();
        for (connection, request) in finders {
            let result = result.clone();
            let passed_over = listed(&passed_over);
            let found = SaverEvent::Found { connection, request, result, passed_over, named };
            self.report(found).await;
        }
    }
}

impl SaverService {
    /// Counts the unsound checkpoints that a search passed over, and emits an event for each.
    fn report_passed_over(
        &self,
        newest: &Result<Option<CheckpointId>, CheckpointFault>,
        passed_over: &[(String, String)],
    ) {
        let taken = newest.as_ref().ok().and_then(Option::as_ref);
        let taken = taken.map(|taken| taken.name.as_str().to_owned());
        self.saver.counters.checkpoints_passed_over.add(passed_over.len() as u64);
        for (checkpoint, cause) in passed_over.iter().cloned() {
            let event = Event::CheckpointPassedOver { checkpoint, cause, taken: taken.clone() };
            self.saver.events.emit(&event);
        }
    }
}

/// Returns the passed-over checkpoints as an answer lists them, at most `PASSED_OVER_MAX`.
fn listed(passed_over: &[(String, String)]) -> Vec<PassedOver> {
    let newest = passed_over.iter().take(PASSED_OVER_MAX);
    let each = newest.map(|(name, cause)| PassedOver {
        name: Text::clipped(&**name),
        cause: Text::clipped(&**cause),
    });
    each.collect()
}

// The futures that the loop selects over. Each is pending for ever if there is nothing to wait for,
// and cancel-safe.

async fn next_save(
    saving: &mut Option<(SaveRequester, SaverTask<Result<PublishedSave, FailedSave>>)>,
) -> (SaveRequester, Result<PublishedSave, FailedSave>) {
    match saving {
        Some((requester, task)) => (*requester, task.await),
        None => std::future::pending().await,
    }
}

async fn next_search(running: &mut Option<RunningSearch>) -> CheckpointSearch {
    match running {
        Some(search) => (&mut search.task).await,
        None => std::future::pending().await,
    }
}

async fn tick(due: &mut Option<Interval>) {
    match due {
        Some(due) => {
            due.tick().await;
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
