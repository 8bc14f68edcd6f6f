//! The saving thread of the step owner's task: who waits for a checkpoint, to be saved or to be
//! found, and when one is due.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};
use pushpull_common::protocol::wire::Text;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::publisher::{FailedSave, Published, Publisher, Search};
use crate::arena::SaveNote;
use crate::checkpoint::{AbandonFlag, CheckpointName};
use crate::event::{Event, EventSink};
use crate::metrics::{Counters, SaveRecord};
use crate::shard::checkpoints::{PERIODIC_SAVE, SaveRequester, SaverEvent, SaverOrder};

/// A wish of somebody in this process, who waits for what comes of it.
pub(super) type Wish = (Vec<u8>, oneshot::Sender<Result<CheckpointId, String>>);

/// What the saving thread is given.
pub(super) struct Saver {
    pub(super) publisher: Arc<Publisher>,
    pub(super) every: Option<Duration>,
    pub(super) counters: Arc<Counters>,
    /// How the saves go, for those who ask the server's handle.
    pub(super) record: watch::Sender<SaveRecord>,
    /// The same in the state directory, if there is one, for those who look into it.
    pub(super) note: Option<SaveNote>,
    pub(super) events: EventSink,
    pub(super) orders: mpsc::Receiver<SaverOrder>,
    pub(super) wishes: mpsc::Receiver<Wish>,
    pub(super) news: mpsc::Sender<SaverEvent>,
    /// Ends what the publisher does with files.
    pub(super) abandon_flag: AbandonFlag,
    pub(super) stop: CancellationToken,
}

/// Askers for the newest checkpoint; they share the reading of it.
const FINDERS_MAX: usize = 1024;

/// Serves until the server stops, on the thread it is called on.
pub(super) fn run(saver: Saver) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, abandon_flag) = (saver.stop.clone(), saver.abandon_flag.clone());
    // The runtime waits for what is done with files: that ends after the piece in hand.
    let stopping = || abandon_flag.abandon("the server stops");
    runtime.block_on(async {
        tokio::select! {
            () = async { stop.cancelled().await; stopping() } => {}
            () = Desk::new(saver).serve() => {}
        }
    });
    stopping();
    Ok(())
}

/// Who waits for what.
///
/// Invariants: at most one save is under way, because the shard orders the next after the result of this
/// one; and at most one search. A search answers those only who asked before a checkpoint was published beside it.
struct Desk {
    saver: Saver,
    /// Whoever has asked in this process, by ticket.
    tickets: BTreeMap<u64, oneshot::Sender<Result<CheckpointId, String>>>,
    next_ticket: u64,
    saving: Option<(SaveRequester, Task<Result<Published, FailedSave>>)>,
    finding: Option<Finding>,
    /// Who has come since the search under way may be out of date.
    finders: Vec<Finder>,
    /// What was saved last.
    saved: Option<(RestoreEpoch, GlobalStep)>,
    /// The name of the last save that has begun and failed.
    failed: Option<CheckpointName>,
}

type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A connection, and the request that came over it.
type Finder = (u64, Envelope);

struct Finding {
    task: Task<Search>,
    finders: Vec<Finder>,
    /// Whether a checkpoint was published since it began.
    outdated: bool,
}

impl Desk {
    fn new(saver: Saver) -> Desk {
        Desk {
            saver,
            tickets: BTreeMap::new(),
            next_ticket: PERIODIC_SAVE + 1,
            saving: None,
            finding: None,
            finders: Vec::new(),
            saved: None,
            failed: None,
        }
    }

    async fn serve(mut self) {
        let mut due = self.saver.every.map(|every| {
            let mut due = tokio::time::interval_at(Instant::now() + every, every);
            due.set_missed_tick_behavior(MissedTickBehavior::Delay);
            due
        });
        loop {
            let news = tokio::select! {
                order = self.saver.orders.recv() => match order {
                    None => return,
                    Some(order) => self.order(order),
                },
                Some((user, done)) = self.saver.wishes.recv() => Some(self.wish(user, done)),
                (requester, saved) = saved(&mut self.saving) => Some(self.saved(requester, saved)),
                found = found(&mut self.finding) => {
                    self.found(found).await;
                    None
                }
                () = tick(&mut due) => self.due(),
            };
            if let Some(news) = news {
                self.tell(news).await;
            }
        }
    }

    async fn tell(&mut self, news: SaverEvent) {
        // The shard hears until the server stops, and then nobody waits.
        let _ = self.saver.news.send(news).await;
    }

    fn order(&mut self, order: SaverOrder) -> Option<SaverEvent> {
        match order {
            SaverOrder::Find { connection, request } => self.find((connection, request)),
            SaverOrder::Save { requester, user, catalogue, epoch, step } => {
                self.begin_save(requester, user, catalogue, (epoch, step))
            }
            SaverOrder::ReportSave { ticket, result } => {
                if ticket == PERIODIC_SAVE
                    && let Err(cause) = &result
                {
                    // The shard has not even begun: nobody else would hear of it.
                    self.count_failure(cause);
                }
                if let Some(done) = self.tickets.remove(&ticket) {
                    // Whoever asked may not wait any more.
                    let _ = done.send(result);
                }
                None
            }
        }
    }

    fn wish(
        &mut self,
        user: Vec<u8>,
        done: oneshot::Sender<Result<CheckpointId, String>>,
    ) -> SaverEvent {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket, done);
        SaverEvent::SaveRequested { ticket, user }
    }

    /// A checkpoint is due, if none is being saved: the next period is early enough for another.
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
        // The step has not moved: nothing was trained since. Who asks for a save has it in
        // any case, as the user's bytes are new, and what was assigned moves no step.
        if requester.is_periodic() && self.saved == Some(of) {
            let result = Err("no checkpoint is due".to_owned());
            return Some(SaverEvent::Saved { requester, result });
        }
        debug_assert!(self.saving.is_none(), "one is ordered at a time");
        let publisher = self.saver.publisher.clone();
        let save = publisher.save(user, catalogue, of, self.failed);
        self.saving = Some((requester, Box::pin(save)));
        None
    }

    fn saved(
        &mut self,
        requester: SaveRequester,
        result: Result<Published, FailedSave>,
    ) -> SaverEvent {
        self.saving = None;
        match &result {
            Err(FailedSave { cause, begun }) => {
                self.failed = begun.or(self.failed);
                self.count_failure(cause);
            }
            Ok(Published { checkpoint, retained }) => {
                self.succeeded(checkpoint, retained);
                self.saved = Some((checkpoint.epoch, checkpoint.step));
                if let Some(finding) = &mut self.finding {
                    finding.outdated = true;
                }
            }
        }
        let result = result.map(|published| published.checkpoint);
        SaverEvent::Saved { requester, result: result.map_err(|failed| failed.cause) }
    }

    /// A save has failed: counted, told, and noted.
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
    }

    fn succeeded(&mut self, checkpoint: &CheckpointId, retained: &Result<(), String>) {
        let Saver { record, counters, events, note, .. } = &self.saver;
        let (mut failed, name) = (0, checkpoint.name.as_str());
        record.send_modify(|record| failed = record.saved(std::time::Instant::now(), name));
        counters.checkpoints_saved.add(1);
        counters.saves_failed_in_a_row.set(0);
        if failed > 0 {
            events.emit(&Event::SavesResumed { checkpoint: name.to_owned(), failed });
        }
        // One that an earlier process has left goes, too.
        note.iter().for_each(SaveNote::remove);
        if let Err(cause) = retained {
            counters.retentions_failed.add(1);
            let (checkpoint, cause) = (name.to_owned(), cause.clone());
            events.emit(&Event::RetentionFailed { checkpoint, cause });
        }
    }

    fn find(&mut self, finder: Finder) -> Option<SaverEvent> {
        let finders = match &mut self.finding {
            Some(finding) if !finding.outdated => &mut finding.finders,
            _ => &mut self.finders,
        };
        if finders.len() >= FINDERS_MAX {
            let (connection, request) = finder;
            let result = Err(format!("cannot look for checkpoints: {FINDERS_MAX} ask already"));
            return Some(SaverEvent::Found {
                connection,
                request,
                result,
                passed_over: Vec::new(),
            });
        }
        finders.push(finder);
        self.begin_find();
        None
    }

    fn begin_find(&mut self) {
        if self.finding.is_none() && !self.finders.is_empty() {
            let task = Box::pin(self.saver.publisher.clone().find());
            let finders = std::mem::take(&mut self.finders);
            self.finding = Some(Finding { task, finders, outdated: false });
        }
    }

    async fn found(&mut self, search: Search) {
        let Search { newest: result, passed_over } = search;
        self.tell_passed_over(&result, &passed_over);
        let Some(Finding { mut finders, outdated, .. }) = self.finding.take() else { return };
        if outdated && result.is_err() {
            // It may have looked at what the newer checkpoint has superseded.
            self.finders.append(&mut finders);
        }
        self.begin_find();
        for (connection, request) in finders {
            let (result, passed_over) = (result.clone(), named(&passed_over));
            self.tell(SaverEvent::Found { connection, request, result, passed_over }).await;
        }
    }
}

impl Desk {
    /// Checkpoints that are not sound were passed over: counted and told.
    fn tell_passed_over(
        &self,
        newest: &Result<Option<CheckpointId>, String>,
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

/// Checkpoints that were passed over, as an answer names them.
fn named(passed_over: &[(String, String)]) -> Vec<PassedOver> {
    let newest = passed_over.iter().take(PASSED_OVER_MAX);
    let each = newest.map(|(name, cause)| PassedOver {
        name: Text::clipped(&**name),
        cause: Text::clipped(&**cause),
    });
    each.collect()
}

// What a loop waits for: each for ever if there is no such thing, and nothing is lost when another
// comes first.

async fn saved(
    saving: &mut Option<(SaveRequester, Task<Result<Published, FailedSave>>)>,
) -> (SaveRequester, Result<Published, FailedSave>) {
    match saving {
        Some((requester, task)) => (*requester, task.await),
        None => std::future::pending().await,
    }
}

async fn found(finding: &mut Option<Finding>) -> Search {
    match finding {
        Some(finding) => (&mut finding.task).await,
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
