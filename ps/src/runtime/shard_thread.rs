//! A shard's thread: one runtime for the shard, its connections, its clock and its long work.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pushpull_common::access::AccessEvent;
use pushpull_common::ids::ClientEpoch;
use pushpull_common::protocol::Features;
use pushpull_common::status::Status;
use pushpull_net::ArrivedPeer;
use pushpull_net::auth::ProvenPeer;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::connection::{self, Outbox, Outboxes, SentAnswer};
use super::descriptor_watch::DescriptorWatch;
use super::file_jobs::{FileJob, FileJobs};
use super::handle::ServerEnd;
use super::owner_link::{self, OwnerAddress, UnsentFrames};
use super::panics::PanicSlot;
use super::peer_polling::PeerPolling;
use super::saver::SaverOrders;
use crate::config::PsConfig;
use crate::event::{Event, EventSink};
use crate::shard::file_work::saver_order::{SaverEvent, SaverOrder};
use crate::shard::output::ShardOutput;
use crate::shard::values::applier::WorkOutcome;
use crate::shard::{Shard, ShardInput, TICK};

/// How long a stopping shard may take to finish whole pushes and to send answers.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a blocked shard checks whether readers of shared memory have released their blocks:
/// about as long as reading the values of a small model takes.
const BLOCKED_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The time between two looks at whether peers may stay connected.
const REVOCATION_INTERVAL: Duration = Duration::from_millis(500);

/// How many members have ever joined a shard, and how many are present.
pub(super) type Members = (usize, usize);

/// The shard and its connections, shared by the tasks of its thread.
#[derive(Debug)]
pub(super) struct ShardCore {
    shard: RefCell<Shard>,
    outboxes: Outboxes,
    work: Notify,
    /// Since when an update has waited for memory that pulls hold.
    blocked_since: Cell<Option<Instant>>,
    members: watch::Sender<Members>,
    status: watch::Sender<Status>,
    stall_timeout: Duration,
    features: Features,
    events: EventSink,
    descriptor_watch: DescriptorWatch,
    saver_orders: SaverOrders,
    /// Frames for the step owner.
    unsent: UnsentFrames,
    file_jobs: FileJobs,
    flushed: Notify,
    polling: PeerPolling,
    /// Notified when an administrator has stopped the task.
    stop_order: Notify,
    panic: PanicSlot,
}

/// The connections of a shard's thread to the server's other threads and to the step owner.
#[derive(Debug)]
pub(super) struct ShardLinks {
    pub(super) config: Arc<PsConfig>,
    pub(super) arrivals: mpsc::Receiver<ArrivedPeer>,
    pub(super) members: watch::Sender<Members>,
    pub(super) status: watch::Sender<Status>,
    /// Set only on the shard that owns the step.
    pub(super) saver: Option<(mpsc::Sender<SaverOrder>, mpsc::Receiver<SaverEvent>)>,
    /// Set on every shard but the step owner's.
    pub(super) owner: Option<OwnerAddress>,
}

impl ShardCore {
    /// Registers a new connection and returns its number and its outbox.
    pub(super) fn register(&self, proven: Option<ProvenPeer>) -> (u64, Rc<Outbox>) {
        self.outboxes.add(proven)
    }

    /// Removes a connection and releases its pins.
    pub(super) fn forget(&self, connection: u64) {
        self.outboxes.remove(connection);
        self.handle(ShardInput::Disconnected { connection });
        self.work.notify_one();
    }

    /// Passes an input to the shard and carries out its outputs.
    pub(super) fn handle(&self, input: ShardInput<'_>) {
        self.panic.guard(|| self.handle_guarded(input));
    }

    fn handle_guarded(&self, input: ShardInput<'_>) {
        let now = Instant::now();
        self.polling.interrupted(now);
        let mut shard = self.shard.borrow_mut();
        shard.handle(now, input);
        // A small push is applied here, at once. Only the rest of a long one is left to the work
        // loop.
        let mut work = WorkOutcome::Idle;
        if shard.has_work() {
            work = self.track_blocked(now, shard.work(now));
            match work {
                WorkOutcome::More => self.work.notify_one(),
                // Readers of shared memory do not announce when they release a block.
                WorkOutcome::Blocked if shard.is_shared() => self.work.notify_one(),
                _ => {}
            }
        }
        self.deliver(&mut shard, work);
    }

    /// Calls `receive` with the memory for the body of a connection's last message.
    pub(super) fn with_body<R>(
        &self,
        connection: u64,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        self.shard.borrow_mut().with_body(connection, receive)
    }

    /// Takes back the memory of a sent answer and wakes an update that waited for it.
    pub(super) fn answered(&self, answer: SentAnswer) {
        match answer {
            SentAnswer::Rows(rows) => self.shard.borrow_mut().rows_sent(rows),
            SentAnswer::Values(buffers) => {
                self.shard.borrow_mut().pull_sent(buffers);
                self.released();
            }
        }
    }

    /// Wakes the work loop: memory that an update waited for may be free.
    fn released(&self) {
        if self.shard.borrow().has_work() {
            self.work.notify_one();
        }
    }

    /// Emits an event, if there is one, to the server's event sink.
    pub(super) fn emit(&self, event: Option<crate::event::Event>) {
        self.panic.guard(|| event.iter().for_each(|event| self.events.emit(event)));
    }

    /// Returns the watch over lack of descriptors.
    pub(super) fn descriptor_watch(&self) -> &DescriptorWatch {
        &self.descriptor_watch
    }

    /// Returns the newest client epoch that the shard has recorded.
    pub(super) fn newest_epoch(&self) -> ClientEpoch {
        self.shard.borrow().newest_epoch()
    }

    pub(super) fn fault(&self) {
        self.shard.borrow().count_fault();
    }

    /// Carries out the shard's outputs. Frames that can wait are corked while there is work.
    fn deliver(&self, shard: &mut Shard, work: WorkOutcome) {
        while let Some(output) = shard.poll_output() {
            match output {
                ShardOutput::Send { connection, envelope, message, body, crc, can_wait } => {
                    let Some(outbox) = self.outboxes.of(connection) else {
                        continue;
                    };
                    outbox.put(&envelope, &message, crc, body);
                    if can_wait && work == WorkOutcome::More && !outbox.is_full() {
                        self.outboxes.cork(outbox);
                    } else {
                        outbox.send_all();
                    }
                }
                ShardOutput::Shared { connection, envelope, message, descriptors } => {
                    if let Some(outbox) = self.outboxes.of(connection) {
                        outbox.put_shared(&envelope, &message, descriptors);
                        outbox.send_all();
                    }
                }
                ShardOutput::Stream { connection, parts } => {
                    if let Some(outbox) = self.outboxes.of(connection) {
                        outbox.put_parts(parts);
                        outbox.send_all();
                    }
                }
                ShardOutput::Close { connection } => {
                    if let Some(outbox) = self.outboxes.of(connection) {
                        outbox.close();
                    }
                }
                ShardOutput::SaverOrder(order) => self.saver_orders.add(order),
                ShardOutput::SaveShard(save) => self.file_jobs.add(FileJob::Save(save)),
                ShardOutput::RestoreShard(restore) => {
                    self.file_jobs.add(FileJob::Restore(restore));
                }
                ShardOutput::Flush(flush) => self.file_jobs.add_flush(flush),
                ShardOutput::ToOwner { envelope, message } => {
                    self.unsent.add(&envelope, &message);
                }
                ShardOutput::Stop => self.stop_order.notify_one(),
                ShardOutput::Event(event) => self.events.emit(&event),
                // The receiver may be closed while the server stops.
                ShardOutput::Members { joined, present } => {
                    self.members.send_replace((joined, present));
                }
            }
        }
        if work != WorkOutcome::More {
            self.outboxes.send_corked();
        }
    }

    /// Returns the frames that wait for the connection to the step owner.
    pub(super) fn unsent(&self) -> &UnsentFrames {
        &self.unsent
    }

    /// Returns the features of the protocol that this task has.
    pub(super) fn features(&self) -> Features {
        self.features
    }

    /// Returns the polling of the sockets.
    pub(super) fn polling(&self) -> &PeerPolling {
        &self.polling
    }

    /// Runs saves and restores one at a time.
    async fn run_file_jobs(&self) {
        loop {
            let input = self.file_jobs.next().await;
            self.handle(input);
            // A save has released its pins.
            self.released();
        }
    }

    /// Flushes images to the disk until the thread ends.
    async fn keep_flushing(&self) {
        loop {
            let input = self.file_jobs.next_flush().await;
            self.handle(input);
            // Blocks that only older images named are free.
            self.released();
            self.flushed.notify_one();
        }
    }

    /// Passes the saver's events to the shard.
    async fn receive_saver_events(&self, mut events: mpsc::Receiver<SaverEvent>) {
        while let Some(event) = events.recv().await {
            self.handle(ShardInput::SaverEvent(event));
        }
        std::future::pending().await
    }

    /// Does the shard's long work in slices until the thread ends.
    async fn keep_working(&self) {
        loop {
            self.work.notified().await;
            loop {
                match self.work_slice() {
                    // The other tasks of this thread run between two slices.
                    WorkOutcome::More => tokio::task::yield_now().await,
                    WorkOutcome::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(BLOCKED_POLL_INTERVAL).await;
                    }
                    _ => break,
                }
            }
        }
    }

    fn work_slice(&self) -> WorkOutcome {
        let work = self.panic.guard(|| {
            let now = Instant::now();
            self.polling.interrupted(now);
            let mut shard = self.shard.borrow_mut();
            let work = self.track_blocked(now, shard.work(now));
            self.deliver(&mut shard, work);
            work
        });
        work.unwrap_or(WorkOutcome::Idle)
    }

    /// Records since when updates are blocked, and returns `work`.
    fn track_blocked(&self, now: Instant, work: WorkOutcome) -> WorkOutcome {
        let since = self.blocked_since.get().filter(|_| work == WorkOutcome::Blocked);
        self.blocked_since.set(since.or((work == WorkOutcome::Blocked).then_some(now)));
        work
    }

    /// Cuts off the oldest pull in progress once an update has waited `stall_timeout` for its
    /// memory. One slow reader delays updates by no more than that.
    fn cut_slowest_pull(&self, now: Instant) {
        let Some(since) = self.blocked_since.get() else { return };
        if now.saturating_duration_since(since) < self.stall_timeout {
            return;
        }
        // A reader of shared memory has held its blocks since before the update blocked: the values
        // have not changed since.
        let readers = self.shard.borrow_mut().revoke_slow_readers();
        self.cut(&readers);
        if !readers.is_empty() {
            self.blocked_since.set(Some(now));
            return self.work.notify_one();
        }
        if let Some(slowest) = self.outboxes.slowest_pull() {
            self.fault();
            slowest.break_off();
            self.blocked_since.set(Some(now));
        }
    }

    fn cut(&self, connections: &[u64]) {
        for outbox in connections.iter().filter_map(|&connection| self.outboxes.of(connection)) {
            self.fault();
            outbox.break_off();
        }
    }

    /// Ticks the shard and cuts off stalled connections.
    async fn keep_ticking(&self) {
        let mut interval = tokio::time::interval(TICK);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.handle(ShardInput::Tick);
            self.publish_status();
            // If there is always work, nothing else sends these.
            self.outboxes.send_corked();
            self.saver_orders.send();
            let now = Instant::now();
            self.cut_slowest_pull(now);
            let stalled = self.shard.borrow_mut().revoke_stalled_readers(now, self.stall_timeout);
            self.cut(&stalled);
            for outbox in self.outboxes.stalled(now, self.stall_timeout) {
                self.fault();
                outbox.break_off();
            }
        }
    }

    /// Closes the connections of peers whom the credentials let in no more, until the thread ends.
    async fn keep_revoking(&self) {
        loop {
            tokio::time::sleep(REVOCATION_INTERVAL).await;
            for (principal, outbox) in self.outboxes.revoked() {
                outbox.break_off();
                self.shard.borrow().counters().peers_revoked.add(1);
                self.emit(Some(Event::Access(AccessEvent::Revoked { principal })));
            }
        }
    }

    /// Publishes the status of the training for the server's handle.
    fn publish_status(&self) {
        let status = self.shard.borrow().status(Instant::now());
        self.status.send_replace(status);
    }

    /// Tells every peer that understands it that the server has stopped for good. The shard is not asked: it has
    /// panicked.
    fn say_goodbye(&self) {
        for outbox in self.outboxes.all() {
            outbox.say_goodbye();
        }
    }

    /// Finishes whole pushes, sends the remaining frames and closes every connection. If the end
    /// `is_final`, clients are told.
    async fn drain(&self, is_final: bool) {
        let finish = async {
            // An update may wait for a flush, and its answer for another.
            loop {
                let work = self.work_slice();
                // Corked frames must not wait for work that may outlast the timeout.
                self.outboxes.send_corked();
                match work {
                    WorkOutcome::More => tokio::task::yield_now().await,
                    WorkOutcome::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(BLOCKED_POLL_INTERVAL).await;
                    }
                    _ if self.panic.is_set() => break,
                    _ if self.shard.borrow().waits_for_image() => self.flushed.notified().await,
                    _ => break,
                }
            }
            if self.panic.is_set() {
                self.say_goodbye();
            } else if is_final {
                self.handle(ShardInput::Goodbye);
            }
            self.outboxes.close().await;
        };
        // Peers that do not read their answers in time are cut off.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, finish).await;
    }

    /// Waits for the flush under way, as dropping the runtime would. If the flush fails, the files
    /// must record that for the next process.
    async fn await_flush(&self) {
        self.outboxes.break_off();
        while self.shard.borrow().is_flushing() && !self.panic.is_set() {
            self.flushed.notified().await;
        }
    }
}

/// Runs a shard on the calling thread until `stop`.
pub(super) fn run(
    shard: Shard,
    links: ShardLinks,
    stop: &CancellationToken,
    ending: &ServerEnd,
) -> std::io::Result<()> {
    let ShardLinks { config, mut arrivals, members, status, saver, owner } = links;
    let (orders, saver_events) = saver.unzip();
    // Without a saver this channel never yields an event.
    let saver_events = saver_events.unwrap_or_else(|| mpsc::channel(1).1);
    let storage = config.checkpoints.as_ref().map(|checkpoints| checkpoints.storage.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let descriptor_watch = DescriptorWatch::new(config.events.clone(), shard.counters().clone());
    let core = Rc::new(ShardCore {
        shard: RefCell::new(shard),
        outboxes: Outboxes::default(),
        work: Notify::new(),
        blocked_since: Cell::new(None),
        members,
        status,
        stall_timeout: config.network.stall_timeout,
        features: config.features,
        events: config.events.clone(),
        descriptor_watch,
        saver_orders: SaverOrders::new(orders),
        unsent: UnsentFrames::default(),
        file_jobs: FileJobs::new(storage),
        flushed: Notify::new(),
        polling: PeerPolling::new(config.network.busy_poll),
        stop_order: Notify::new(),
        panic: PanicSlot::default(),
    });
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let flushing = core.clone();
        // This task outlives the others: answers wait for a flush while the server stops.
        tokio::task::spawn_local(async move { flushing.keep_flushing().await });
        let serve = async {
            while let Some(arrived) = arrivals.recv().await {
                tokio::task::spawn_local(connection::serve(core.clone(), arrived));
            }
        };
        let keep_owner_link = async {
            match owner {
                Some(owner) => owner_link::run(core.clone(), owner).await,
                None => std::future::pending().await,
            }
        };
        let finish = async {
            ending.finish.cancelled().await;
            core.handle(ShardInput::Finish);
            std::future::pending().await
        };
        let ordered = async {
            core.stop_order.notified().await;
            ending.is_final.store(true, Ordering::Relaxed);
            stop.cancel();
        };
        let run = async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = ordered => {}
                () = core.panic.wait() => {}
                () = finish => {}
                () = keep_owner_link => {}
                () = core.keep_working() => {}
                () = core.keep_ticking() => {}
                () = core.keep_revoking() => {}
                () = core.polling.keep_polling() => {}
                () = core.run_file_jobs() => {}
                () = core.receive_saver_events(saver_events) => {}
                () = serve => {}
            }
        };
        core.panic.contain(run).await;
        if core.panic.is_set() {
            // The other shards of the task end with this one, and say goodbye as well.
            ending.is_final.store(true, Ordering::Relaxed);
            stop.cancel();
        }
        drop(arrivals);
        // File I/O under way ends after its current piece; this thread waits for it.
        core.shard.borrow().abandon_files();
        core.drain(ending.is_final.load(Ordering::Relaxed)).await;
        core.await_flush().await;
        core.panic.guard(|| core.publish_status());
    });
    core.panic.resume();
    Ok(())
}
